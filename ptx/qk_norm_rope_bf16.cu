// The RMS norm and the rotation of every query and key head stored in bf16.
#include "qk_norm_rope_narrow.cuh"

QK_NORM_ROPE_ENTRIES(bf16)
