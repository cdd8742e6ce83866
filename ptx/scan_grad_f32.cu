#include "scan_grad.cuh"

SCAN_GRAD_ENTRIES(f32, float)
