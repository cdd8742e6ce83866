// The RMS norm, alone or with the residual addition before it, for activations in f32.
#include "rms_norm.cuh"

RMS_NORM_ENTRIES(f32)
