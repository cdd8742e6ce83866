#include "scan_grad.cuh"

SCAN_GRAD_ENTRIES(f16, narrow::f16)
