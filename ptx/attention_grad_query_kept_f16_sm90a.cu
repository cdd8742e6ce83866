// The query columns of attention's gradient from what the key and value pass has kept, in f16 by warpgroups:
// src/op/attention.rs, `AttentionGradQuery`.
#include "attention_warpgroup_grad_query_kept.cuh"

GROUP_GRAD_QUERY_KEPT(attention_grad_query_kept_f16_sm90a_d64, F16, 64, 2, 4, 2)
GROUP_GRAD_QUERY_KEPT(attention_grad_query_kept_f16_sm90a_d128, F16, 128, 1, 3, 3)
