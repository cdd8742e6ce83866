#include "conv1d_window.cuh"

CONV1D_WALK_ENTRY(conv1d_bf16_4_pairs, narrow::bf16, 4)
CONV1D_ENTRY(conv1d_bf16_any, narrow::bf16)
