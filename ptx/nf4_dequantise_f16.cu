// Weights stored as NF4, back as numbers stored as f16.
#include "nf4_dequantise.cuh"

NF4_DEQUANTISE(f16, narrow::f16)
