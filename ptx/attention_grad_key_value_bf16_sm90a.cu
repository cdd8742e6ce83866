// The key and value columns of attention's gradient with products in bf16 by warpgroups: src/op/attention.rs,
// `AttentionGradKeyValue`.
#include "attention_warpgroup_grad_key_value.cuh"

GROUP_GRAD_KEY_VALUE(attention_grad_key_value_bf16_sm90a_d64, Bf16, 64, 1, 3, 3)
GROUP_GRAD_KEY_VALUE(attention_grad_key_value_bf16_sm90a_d128, Bf16, 128, 2, 3, 1)
// With the rotation.
GROUP_GRAD_KEY_VALUE_TURNED(attention_grad_key_value_bf16_sm90a_d64_turned, Bf16, 64, 1, 3, 3)
GROUP_GRAD_KEY_VALUE_TURNED(attention_grad_key_value_bf16_sm90a_d128_turned, Bf16, 128, 2, 3, 1)
// With the rotation and what the query pass takes over.
GROUP_GRAD_KEY_VALUE_KEEPING(attention_grad_key_value_bf16_sm90a_d64_keeping, Bf16, 64, 1, 3, 3)
GROUP_GRAD_KEY_VALUE_KEEPING(attention_grad_key_value_bf16_sm90a_d128_keeping, Bf16, 128, 2, 3, 1)
