#include "scan_grad.cuh"

SCAN_GRAD_ENTRIES(bf16, narrow::bf16)
