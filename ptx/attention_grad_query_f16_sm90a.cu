// The query columns of attention's gradient with products in f16 by warpgroups: src/op/attention.rs,
// `AttentionGradQuery`.
#include "attention_warpgroup_grad_query.cuh"

GROUP_GRAD_QUERY(attention_grad_query_f16_sm90a_d64, F16, 64, 1, 3, 3)
GROUP_GRAD_QUERY(attention_grad_query_f16_sm90a_d128, F16, 128, 2, 4, 1)
// With the dot products of the output, and the rotation.
GROUP_GRAD_QUERY_WITH_DELTA(attention_grad_query_f16_sm90a_d64_with_delta, F16, 64, 1, 3, 3)
GROUP_GRAD_QUERY_WITH_DELTA(attention_grad_query_f16_sm90a_d128_with_delta, F16, 128, 2, 4, 1)
