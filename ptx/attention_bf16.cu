// Causal attention with products in bf16: src/op/attention.rs, `Attention`.
#include "attention_tensor_forward.cuh"

ATTENTION(attention_bf16_d32, Bf16, 32, 1, 4, 2, true, true, 3)
ATTENTION(attention_bf16_d64, Bf16, 64, 2, 4, 2, false, true, 2)
ATTENTION(attention_bf16_d128, Bf16, 128, 2, 4, 2, false, true, 2)
// Fewer rows a block, so that a small call has blocks for every multiprocessor.
ATTENTION(attention_bf16_d64_small, Bf16, 64, 1, 4, 2, true, true, 3)
ATTENTION(attention_bf16_d128_small, Bf16, 128, 1, 4, 2, true, true, 2)
// Heads of any size up to the kernel's, at any alignment.
ATTENTION(attention_bf16_any64, Bf16, 64, 1, 4, 2, true, false, 2)
ATTENTION(attention_bf16_any128, Bf16, 128, 1, 4, 2, true, false, 1)
ATTENTION(attention_bf16_any256, Bf16, 256, 1, 4, 1, false, false, 1)
