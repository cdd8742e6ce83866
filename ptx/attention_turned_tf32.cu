// The rotation and causal attention with products in tf32, for sequences of one tile.
#include "attention_tensor_turned.cuh"

ATTENTION_TURNED(attention_turned_tf32_d32, Tf32, 32)
ATTENTION_TURNED(attention_turned_tf32_d64, Tf32, 64)
