// The gradient of the norm and the rotation of every query and key head stored in f16.
#include "qk_norm_rope_narrow.cuh"

QK_NORM_ROPE_GRAD_ENTRIES(f16)
