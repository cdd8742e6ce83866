// With s = sigmoid(g): du = da * (g * s), dg = (da * u) * (s * fma(g, 1 - s, 1)), written over g and u in f16.
#include "swiglu.cuh"

SWIGLU_GRAD_ENTRY(swiglu_grad_f16, f16, backward_rows)
SWIGLU_GRAD_ENTRY(swiglu_grad_f16_octets, f16, backward_vectors)
