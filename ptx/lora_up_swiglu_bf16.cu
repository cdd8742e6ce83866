// y[t, i * d + o] = fma(scale, sum_k s[t, i * rank + k] * b[i * d + o, k], y[t, i * d + o]) for gate (i = 0) and up (i = 1), and
// a = (g * sigmoid(g)) * u of the rounded y, in bf16.
#include "lora_up_swiglu.cuh"

LORA_UP_SWIGLU(lora_up_swiglu_bf16, Bf16, storage::bf16)
