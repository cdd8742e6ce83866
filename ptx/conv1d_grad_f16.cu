#include "conv1d_grad.cuh"

CONV1D_GRAD_ENTRY(conv1d_grad_f16_4, narrow::f16, 4)
CONV1D_GRAD_ENTRY(conv1d_grad_f16_any, narrow::f16, 0)
