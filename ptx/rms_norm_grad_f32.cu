// The gradient of the RMS norm for activations in f32.
#include "rms_norm_grad_relay.cuh"

RMS_NORM_GRAD_ENTRIES(f32)
