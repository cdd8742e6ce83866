// Causal attention with products in f16 by warpgroups: src/op/attention.rs, `Attention`.
#include "attention_warpgroup_forward.cuh"

GROUP_ATTENTION(attention_f16_sm90a_d64, F16, 64, 2, 4, 2)
GROUP_ATTENTION(attention_f16_sm90a_d128, F16, 128, 3, 3, 1)
