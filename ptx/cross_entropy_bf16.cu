// Weighted cross-entropy of logits stored in bf16.
#define CROSS_ENTROPY_SCALE nullptr
#define CROSS_ENTROPY_SCALE_PARAMETER
#include "cross_entropy_narrow.cuh"

CROSS_ENTROPY_ENTRIES(bf16, false)
