// The gradient of a bias from activation gradients stored in f16.
#include "bias_grad_narrow.cuh"

BIAS_GRAD_ENTRY(bias_grad_f16, f16, false)
BIAS_GRAD_ENTRY(bias_grad_f16_octets, f16, true)
