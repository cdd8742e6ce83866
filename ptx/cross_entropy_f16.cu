// Weighted cross-entropy of logits stored in f16, whose gradient carries the loss scale.
#define CROSS_ENTROPY_SCALE loss_scale
#define CROSS_ENTROPY_SCALE_PARAMETER const unsigned *__restrict__ loss_scale,
#include "cross_entropy_narrow.cuh"

CROSS_ENTROPY_ENTRIES(f16, true)
