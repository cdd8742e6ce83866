// Rotates queries and keys stored in f16 in place: a' = fma(a, cos, -(b * sin)), b' = fma(b, cos, a * sin).
#include "rope.cuh"

ROPE_ENTRY(rope_f16, f16, false, false)
ROPE_ENTRY(rope_f16_quads, f16, false, true)
