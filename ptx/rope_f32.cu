// Rotates queries and keys in place: a' = fma(a, cos, -(b * sin)), b' = fma(b, cos, a * sin).
#include "rope.cuh"

ROPE_ENTRY(rope_f32, false, false)
ROPE_ENTRY(rope_f32_quads, false, true)
