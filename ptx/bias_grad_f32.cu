// The gradient of a bias, from dy in f32.
#include "bias_grad.cuh"

BIAS_GRAD_ENTRY(bias_grad_f32, f32, false)
BIAS_GRAD_ENTRY(bias_grad_f32_quads, f32, true)
// The sum over no tokens.
BIAS_GRAD_NONE(bias_grad_f32_none)
