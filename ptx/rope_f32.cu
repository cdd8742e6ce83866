// Rotates queries and keys stored in f32 in place: a' = fma(a, cos, -(b * sin)), b' = fma(b, cos, a * sin).
#include "rope.cuh"

ROPE_ENTRY(rope_f32, f32, false, false)
ROPE_ENTRY(rope_f32_quads, f32, false, true)
