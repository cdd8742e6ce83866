// The gradient of a bias, from dy in f16.
#include "bias_grad.cuh"

BIAS_GRAD_ENTRY(bias_grad_f16, f16, false)
BIAS_GRAD_ENTRY(bias_grad_f16_octets, f16, true)
