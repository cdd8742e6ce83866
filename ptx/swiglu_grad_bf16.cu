// With s = sigmoid(g): du = da * (g * s), dg = (da * u) * (s * fma(g, 1 - s, 1)), written over g and u in bf16; where the
// output is restored also a = (g * s) * u, over da.
#include "swiglu.cuh"

SWIGLU_GRAD_ENTRY(swiglu_grad_bf16, bf16, backward_rows, false)
SWIGLU_GRAD_ENTRY(swiglu_grad_bf16_octets, bf16, backward_vectors, false)
SWIGLU_GRAD_ENTRY(swiglu_grad_bf16_restore, bf16, backward_rows, true)
SWIGLU_GRAD_ENTRY(swiglu_grad_bf16_restore_octets, bf16, backward_vectors, true)
