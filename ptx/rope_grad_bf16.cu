// Rotates the gradients of queries and keys stored in bf16 back in place.
#include "rope.cuh"

ROPE_ENTRY(rope_grad_bf16, bf16, true, false)
ROPE_ENTRY(rope_grad_bf16_quads, bf16, true, true)
