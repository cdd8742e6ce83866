#include "conv1d_grad.cuh"

CONV1D_GRAD_ENTRY(conv1d_grad_bf16_4, narrow::bf16, 4)
CONV1D_GRAD_ENTRY(conv1d_grad_bf16_any, narrow::bf16, 0)
