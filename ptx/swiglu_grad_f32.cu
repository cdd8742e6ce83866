// With s = sigmoid(g): du = da * (g * s), dg = (da * u) * (s * fma(g, 1 - s, 1)), written over g and u in f32.
#include "swiglu.cuh"

SWIGLU_GRAD_ENTRY(swiglu_grad_f32, f32, backward_rows)
SWIGLU_GRAD_ENTRY(swiglu_grad_f32_quads, f32, backward_vectors)
