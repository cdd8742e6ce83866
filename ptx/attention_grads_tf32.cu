// All columns of attention's gradient with products in tf32, for sequences of one tile.
#include "attention_tensor_grads.cuh"

ATTENTION_GRADS(attention_grads_tf32_d32, Tf32, 32, 4, true, 3)
ATTENTION_GRADS(attention_grads_tf32_d64, Tf32, 64, 4, true, 2)
