// Rotates the gradients of queries and keys back: da = fma(da', cos, db' * sin), db = fma(db', cos, -(da' * sin)).
#include "rope.cuh"

ROPE_ENTRY(rope_grad_f32, true, false)
ROPE_ENTRY(rope_grad_f32_quads, true, true)
