// With s = sigmoid(g): du = da * (g * s), dg = (da * u) * (s * fma(g, 1 - s, 1)), written over g and u in bf16.
#include "swiglu.cuh"

SWIGLU_GRAD_ENTRY(swiglu_grad_bf16, bf16, backward_rows)
SWIGLU_GRAD_ENTRY(swiglu_grad_bf16_octets, bf16, backward_vectors)
