// The rotation and causal attention with products in bf16, for sequences of one tile.
#include "attention_tensor_turned.cuh"

ATTENTION_TURNED(attention_turned_bf16_d32, Bf16, 32)
ATTENTION_TURNED(attention_turned_bf16_d64, Bf16, 64)
ATTENTION_TURNED(attention_turned_bf16_d128, Bf16, 128)
