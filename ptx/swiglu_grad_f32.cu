// With s = sigmoid(g): du = da * (g * s), dg = (da * u) * (s * fma(g, 1 - s, 1)), written over g and u; where the
// output is restored also a = (g * s) * u, over da.
#include "swiglu.cuh"

SWIGLU_GRAD_ENTRY(swiglu_grad_f32, f32, backward_rows, false)
SWIGLU_GRAD_ENTRY(swiglu_grad_f32_quads, f32, backward_vectors, false)
SWIGLU_GRAD_ENTRY(swiglu_grad_f32_restore, f32, backward_rows, true)
SWIGLU_GRAD_ENTRY(swiglu_grad_f32_restore_quads, f32, backward_vectors, true)
