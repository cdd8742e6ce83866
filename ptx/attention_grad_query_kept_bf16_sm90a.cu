// The query columns of attention's gradient from what the key and value pass has kept, in bf16 by warpgroups:
// src/op/attention.rs, `AttentionGradQuery`.
#include "attention_warpgroup_grad_query_kept.cuh"

GROUP_GRAD_QUERY_KEPT(attention_grad_query_kept_bf16_sm90a_d64, Bf16, 64, 2, 4, 2)
GROUP_GRAD_QUERY_KEPT(attention_grad_query_kept_bf16_sm90a_d128, Bf16, 128, 1, 3, 3)
