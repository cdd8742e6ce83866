#include "scan.cuh"

SCAN_ENTRIES(f32, float)
