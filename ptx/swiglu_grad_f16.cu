// With s = sigmoid(g): du = da * (g * s), dg = (da * u) * (s * fma(g, 1 - s, 1)), written over g and u in f16; where the
// output is restored also a = (g * s) * u, over da.
#include "swiglu.cuh"

SWIGLU_GRAD_ENTRY(swiglu_grad_f16, f16, backward_rows, false)
SWIGLU_GRAD_ENTRY(swiglu_grad_f16_octets, f16, backward_vectors, false)
SWIGLU_GRAD_ENTRY(swiglu_grad_f16_restore, f16, backward_rows, true)
SWIGLU_GRAD_ENTRY(swiglu_grad_f16_restore_octets, f16, backward_vectors, true)
