#include "conv1d.cuh"

CONV1D_ENTRY(conv1d_f16_4, narrow::f16, 4)
CONV1D_ENTRY(conv1d_f16_any, narrow::f16, 0)
