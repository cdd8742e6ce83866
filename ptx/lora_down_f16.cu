// s[t, r] = sum_i x[t, i] * a[r, i], one chain of f16 steps over ascending i, for up to 16, 32 and 48 ranks.
#include "lora_down.cuh"

DOWN(f16, F16)
