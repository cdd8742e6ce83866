// The key and value columns of attention's gradient with products in tf32: src/op/attention.rs,
// `AttentionGradKeyValue`.
#include "attention_tensor_grad_key_value.cuh"

ATTENTION_GRAD_KEY_VALUE(attention_grad_key_value_tf32_d32, Tf32, 32, 32, 4, 64, 2, true, 3)
ATTENTION_GRAD_KEY_VALUE(attention_grad_key_value_tf32_d64, Tf32, 64, 64, 4, 64, 2, true, 2)
ATTENTION_GRAD_KEY_VALUE(attention_grad_key_value_tf32_d128, Tf32, 128, 128, 4, 32, 2, true, 1)
// Heads of any size up to the kernel's, at any alignment.
ATTENTION_GRAD_KEY_VALUE(attention_grad_key_value_tf32_any64, Tf32, 64, 64, 4, 64, 2, false, 2)
ATTENTION_GRAD_KEY_VALUE(attention_grad_key_value_tf32_any128, Tf32, 128, 64, 4, 64, 2, false, 1)
ATTENTION_GRAD_KEY_VALUE(attention_grad_key_value_tf32_any256, Tf32, 256, 64, 2, 32, 2, false, 1)
// With the rotation.
ATTENTION_GRAD_KEY_VALUE_TURNED(attention_grad_key_value_tf32_d32_turned, Tf32, 32, 4, 64, 3)
ATTENTION_GRAD_KEY_VALUE_TURNED(attention_grad_key_value_tf32_d64_turned, Tf32, 64, 4, 64, 2)
ATTENTION_GRAD_KEY_VALUE_TURNED(attention_grad_key_value_tf32_d128_turned, Tf32, 128, 4, 32, 1)
