#include "scan.cuh"

SCAN_ENTRIES(f16, narrow::f16)
