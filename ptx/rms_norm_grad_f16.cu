// The gradient of the RMS norm for activations in f16.
#include "rms_norm_grad_relay.cuh"

RMS_NORM_GRAD_ENTRIES(f16)
