// The query columns of attention's gradient with products in tf32: src/op/attention.rs, `AttentionGradQuery`.
#include "attention_tensor_grad_query.cuh"

ATTENTION_GRAD_QUERY(attention_grad_query_tf32_d32, Tf32, 32, 4, 64, true, true, 3)
ATTENTION_GRAD_QUERY(attention_grad_query_tf32_d64, Tf32, 64, 4, 64, true, true, 2)
ATTENTION_GRAD_QUERY(attention_grad_query_tf32_d128, Tf32, 128, 4, 64, false, true, 1)
// Heads of any size up to the kernel's, at any alignment.
ATTENTION_GRAD_QUERY(attention_grad_query_tf32_any64, Tf32, 64, 4, 64, false, false, 2)
ATTENTION_GRAD_QUERY(attention_grad_query_tf32_any128, Tf32, 128, 4, 64, false, false, 1)
ATTENTION_GRAD_QUERY(attention_grad_query_tf32_any256, Tf32, 256, 2, 32, false, false, 1)
// With the dot products of the output, and the rotation.
ATTENTION_GRAD_QUERY_WITH_DELTA(attention_grad_query_tf32_d32_with_delta, Tf32, 32, 4, 64, true, 3)
ATTENTION_GRAD_QUERY_WITH_DELTA(attention_grad_query_tf32_d64_with_delta, Tf32, 64, 4, 64, true, 2)
ATTENTION_GRAD_QUERY_WITH_DELTA(attention_grad_query_tf32_d128_with_delta, Tf32, 128, 4, 64, false, 1)
