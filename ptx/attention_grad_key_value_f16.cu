// The key and value columns of attention's gradient with products in f16: src/op/attention.rs,
// `AttentionGradKeyValue`.
#include "attention_tensor_grad_key_value.cuh"

ATTENTION_GRAD_KEY_VALUE(attention_grad_key_value_f16_d32, F16, 32, 32, 4, 64, 2, true, 4)
ATTENTION_GRAD_KEY_VALUE(attention_grad_key_value_f16_d64, F16, 64, 64, 4, 64, 2, true, 3)
ATTENTION_GRAD_KEY_VALUE(attention_grad_key_value_f16_d128, F16, 128, 128, 4, 64, 2, true, 2)
// Heads of any size up to the kernel's, at any alignment.
ATTENTION_GRAD_KEY_VALUE(attention_grad_key_value_f16_any64, F16, 64, 64, 4, 64, 2, false, 2)
ATTENTION_GRAD_KEY_VALUE(attention_grad_key_value_f16_any128, F16, 128, 64, 4, 64, 2, false, 1)
ATTENTION_GRAD_KEY_VALUE(attention_grad_key_value_f16_any256, F16, 256, 64, 4, 32, 2, false, 1)
// With the rotation.
ATTENTION_GRAD_KEY_VALUE_TURNED(attention_grad_key_value_f16_d32_turned, F16, 32, 4, 64, 4)
ATTENTION_GRAD_KEY_VALUE_TURNED(attention_grad_key_value_f16_d64_turned, F16, 64, 4, 64, 3)
ATTENTION_GRAD_KEY_VALUE_TURNED(attention_grad_key_value_f16_d128_turned, F16, 128, 4, 64, 2)
