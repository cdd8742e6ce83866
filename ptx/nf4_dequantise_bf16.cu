// Weights stored as NF4, back as numbers stored as bf16.
#include "nf4_dequantise.cuh"

NF4_DEQUANTISE(bf16, narrow::bf16)
