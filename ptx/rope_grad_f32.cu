// Rotates the gradients of queries and keys stored in f32 back in place.
#include "rope.cuh"

ROPE_ENTRY(rope_grad_f32, f32, true, false)
ROPE_ENTRY(rope_grad_f32_quads, f32, true, true)
