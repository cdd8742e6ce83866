#include "conv1d_window.cuh"

CONV1D_WALK_ENTRY(conv1d_f32_4_pairs, float, 4)
CONV1D_ENTRY(conv1d_f32_any, float)
