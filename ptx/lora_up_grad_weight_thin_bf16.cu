// db[row + o, k] = (sum_t dy[t, first + o] * s[t, part * rank + k]) * scale, as in lora_up_grad_weight_bf16.cu, where all pieces
// are one tree and every row is whole chunks of 16 bytes.
#include "lora_thin.cuh"

UP_GRAD_WEIGHT_THIN(bf16, Bf16)
