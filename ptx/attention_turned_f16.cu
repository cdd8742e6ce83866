// The rotation and causal attention with products in f16, for sequences of one tile.
#include "attention_tensor_turned.cuh"

ATTENTION_TURNED(attention_turned_f16_d32, F16, 32)
ATTENTION_TURNED(attention_turned_f16_d64, F16, 64)
ATTENTION_TURNED(attention_turned_f16_d128, F16, 128)
