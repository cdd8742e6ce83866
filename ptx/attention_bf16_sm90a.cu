// Causal attention with products in bf16 by warpgroups: src/op/attention.rs, `Attention`.
#include "attention_warpgroup_forward.cuh"

GROUP_ATTENTION(attention_bf16_sm90a_d64, Bf16, 64, 2, 4, 2)
GROUP_ATTENTION(attention_bf16_sm90a_d128, Bf16, 128, 3, 3, 1)
