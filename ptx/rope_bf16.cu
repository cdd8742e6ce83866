// Rotates queries and keys stored in bf16 in place: a' = fma(a, cos, -(b * sin)), b' = fma(b, cos, a * sin).
#include "rope.cuh"

ROPE_ENTRY(rope_bf16, bf16, false, false)
ROPE_ENTRY(rope_bf16_quads, bf16, false, true)
