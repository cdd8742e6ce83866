// Rotates the gradients of queries and keys stored in f16 back in place.
#include "rope.cuh"

ROPE_ENTRY(rope_grad_f16, f16, true, false)
ROPE_ENTRY(rope_grad_f16_quads, f16, true, true)
