#include "conv1d.cuh"

CONV1D_ENTRY(conv1d_bf16_4, narrow::bf16, 4)
CONV1D_ENTRY(conv1d_bf16_any, narrow::bf16, 0)
