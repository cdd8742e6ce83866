// All columns of attention's gradient with products in bf16, for sequences of one tile.
#include "attention_tensor_grads.cuh"

ATTENTION_GRADS(attention_grads_bf16_d32, Bf16, 32, 4, true, 4)
ATTENTION_GRADS(attention_grads_bf16_d64, Bf16, 64, 4, true, 2)
ATTENTION_GRADS(attention_grads_bf16_d128, Bf16, 128, 4, true, 2)
