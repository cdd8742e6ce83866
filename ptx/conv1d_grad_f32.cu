#include "conv1d_grad.cuh"

CONV1D_GRAD_ENTRY(conv1d_grad_f32_4, float, 4)
CONV1D_GRAD_ENTRY(conv1d_grad_f32_any, float, 0)
