// Weights stored as NF4, back as numbers stored as f32.
#include "nf4_dequantise.cuh"

NF4_DEQUANTISE(f32, float)
