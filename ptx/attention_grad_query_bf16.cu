// The query columns of attention's gradient with products in bf16: src/op/attention.rs, `AttentionGradQuery`.
#include "attention_tensor_grad_query.cuh"

ATTENTION_GRAD_QUERY(attention_grad_query_bf16_d32, Bf16, 32, 4, 64, true, true, 4)
ATTENTION_GRAD_QUERY(attention_grad_query_bf16_d64, Bf16, 64, 4, 64, true, true, 3)
ATTENTION_GRAD_QUERY(attention_grad_query_bf16_d128, Bf16, 128, 4, 64, true, true, 2)
// Heads of any size up to the kernel's, at any alignment.
ATTENTION_GRAD_QUERY(attention_grad_query_bf16_any64, Bf16, 64, 4, 64, false, false, 2)
ATTENTION_GRAD_QUERY(attention_grad_query_bf16_any128, Bf16, 128, 4, 64, false, false, 1)
ATTENTION_GRAD_QUERY(attention_grad_query_bf16_any256, Bf16, 256, 4, 32, false, false, 1)
// With the dot products of the output, and the rotation.
ATTENTION_GRAD_QUERY_WITH_DELTA(attention_grad_query_bf16_d32_with_delta, Bf16, 32, 4, 64, true, 4)
ATTENTION_GRAD_QUERY_WITH_DELTA(attention_grad_query_bf16_d64_with_delta, Bf16, 64, 4, 64, true, 3)
ATTENTION_GRAD_QUERY_WITH_DELTA(attention_grad_query_bf16_d128_with_delta, Bf16, 128, 4, 64, true, 2)
