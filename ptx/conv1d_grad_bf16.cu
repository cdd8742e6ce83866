#include "conv1d_grad_walk.cuh"

CONV1D_GRAD_WALK_ENTRY(conv1d_grad_bf16_4, narrow::bf16, 4, 1)
CONV1D_GRAD_WALK_ENTRY(conv1d_grad_bf16_4_pairs, narrow::bf16, 4, 2)
CONV1D_GRAD_ENTRY(conv1d_grad_bf16_any, narrow::bf16)
