#include "conv1d_grad_walk.cuh"

CONV1D_GRAD_WALK_ENTRY(conv1d_grad_f32_4, float, 4, 1)
CONV1D_GRAD_WALK_ENTRY(conv1d_grad_f32_4_pairs, float, 4, 2)
CONV1D_GRAD_ENTRY(conv1d_grad_f32_any, float)
