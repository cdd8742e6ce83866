// The RMS norm of an f32 residual stream for activations in f16.
#include "rms_norm_narrow.cuh"

RMS_NORM_ENTRIES(f16)
