#include "scan.cuh"

SCAN_ENTRIES(bf16, narrow::bf16)
