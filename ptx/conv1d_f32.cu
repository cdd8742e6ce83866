#include "conv1d.cuh"

CONV1D_ENTRY(conv1d_f32_4, float, 4)
CONV1D_ENTRY(conv1d_f32_any, float, 0)
