// The key and value columns of attention's gradient with products in bf16: src/op/attention.rs,
// `AttentionGradKeyValue`.
#include "attention_tensor_grad_key_value.cuh"

ATTENTION_GRAD_KEY_VALUE(attention_grad_key_value_bf16_d32, Bf16, 32, 32, 4, 64, 2, true, 4)
ATTENTION_GRAD_KEY_VALUE(attention_grad_key_value_bf16_d64, Bf16, 64, 64, 4, 64, 2, true, 3)
ATTENTION_GRAD_KEY_VALUE(attention_grad_key_value_bf16_d128, Bf16, 128, 128, 4, 64, 2, true, 2)
// Heads of any size up to the kernel's, at any alignment.
ATTENTION_GRAD_KEY_VALUE(attention_grad_key_value_bf16_any64, Bf16, 64, 64, 4, 64, 2, false, 2)
ATTENTION_GRAD_KEY_VALUE(attention_grad_key_value_bf16_any128, Bf16, 128, 64, 4, 64, 2, false, 1)
ATTENTION_GRAD_KEY_VALUE(attention_grad_key_value_bf16_any256, Bf16, 256, 64, 4, 32, 2, false, 1)
// With the rotation.
ATTENTION_GRAD_KEY_VALUE_TURNED(attention_grad_key_value_bf16_d32_turned, Bf16, 32, 4, 64, 4)
ATTENTION_GRAD_KEY_VALUE_TURNED(attention_grad_key_value_bf16_d64_turned, Bf16, 64, 4, 64, 3)
ATTENTION_GRAD_KEY_VALUE_TURNED(attention_grad_key_value_bf16_d128_turned, Bf16, 128, 4, 64, 2)
