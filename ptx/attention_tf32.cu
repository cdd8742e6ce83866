// Causal attention with products in tf32: src/op/attention.rs, `Attention`.
#include "attention_tensor_forward.cuh"

ATTENTION(attention_tf32_d32, Tf32, 32, 1, 4, 2, true, true, 3)
ATTENTION(attention_tf32_d64, Tf32, 64, 2, 4, 2, false, true, 2)
ATTENTION(attention_tf32_d128, Tf32, 128, 2, 4, 2, false, true, 1)
// Fewer rows a block, so that a small call has blocks for every multiprocessor.
ATTENTION(attention_tf32_d64_small, Tf32, 64, 1, 4, 2, true, true, 2)
ATTENTION(attention_tf32_d128_small, Tf32, 128, 1, 4, 2, true, true, 1)
// Heads of any size up to the kernel's, at any alignment.
ATTENTION(attention_tf32_any64, Tf32, 64, 1, 4, 2, true, false, 2)
ATTENTION(attention_tf32_any128, Tf32, 128, 1, 4, 2, true, false, 1)
ATTENTION(attention_tf32_any256, Tf32, 256, 1, 4, 1, false, false, 1)
