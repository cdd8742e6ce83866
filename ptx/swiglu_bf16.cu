// a = (g * sigmoid(g)) * u in bf16, where a row of gate_up holds g then u.
#include "swiglu.cuh"

SWIGLU_ENTRY(swiglu_bf16, bf16, forward_rows)
SWIGLU_ENTRY(swiglu_bf16_octets, bf16, forward_vectors)
