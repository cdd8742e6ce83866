#include "conv1d_grad_walk.cuh"

CONV1D_GRAD_WALK_ENTRY(conv1d_grad_f16_4, narrow::f16, 4, 1)
CONV1D_GRAD_WALK_ENTRY(conv1d_grad_f16_4_pairs, narrow::f16, 4, 2)
CONV1D_GRAD_ENTRY(conv1d_grad_f16_any, narrow::f16)
