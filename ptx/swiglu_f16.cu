// a = (g * sigmoid(g)) * u in f16, where a row of gate_up holds g then u.
#include "swiglu.cuh"

SWIGLU_ENTRY(swiglu_f16, f16, forward_rows)
SWIGLU_ENTRY(swiglu_f16_octets, f16, forward_vectors)
