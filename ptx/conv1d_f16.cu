#include "conv1d_window.cuh"

CONV1D_WALK_ENTRY(conv1d_f16_4_pairs, narrow::f16, 4)
CONV1D_ENTRY(conv1d_f16_any, narrow::f16)
