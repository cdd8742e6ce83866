// a = (g * sigmoid(g)) * u in f32, where a row of gate_up holds g then u.
#include "swiglu.cuh"

SWIGLU_ENTRY(swiglu_f32, f32, forward_rows)
SWIGLU_ENTRY(swiglu_f32_quads, f32, forward_vectors)
