// The RMS norm, alone or with the residual addition before it, for activations in bf16.
#include "rms_norm.cuh"

RMS_NORM_ENTRIES(bf16)
