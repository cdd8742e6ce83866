// All columns of attention's gradient with products in f16, for sequences of one tile.
#include "attention_tensor_grads.cuh"

ATTENTION_GRADS(attention_grads_f16_d32, F16, 32, 4, true, 4)
ATTENTION_GRADS(attention_grads_f16_d64, F16, 64, 4, true, 2)
ATTENTION_GRADS(attention_grads_f16_d128, F16, 128, 4, true, 2)
