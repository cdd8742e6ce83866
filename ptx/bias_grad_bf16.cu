// The gradient of a bias, from dy in bf16.
#include "bias_grad.cuh"

BIAS_GRAD_ENTRY(bias_grad_bf16, bf16, false)
BIAS_GRAD_ENTRY(bias_grad_bf16_octets, bf16, true)
