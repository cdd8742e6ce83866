// Causal attention with products in f16: src/op/attention.rs, `Attention`.
#include "attention_tensor_forward.cuh"

ATTENTION(attention_f16_d32, F16, 32, 1, 4, 2, true, true, 3)
ATTENTION(attention_f16_d64, F16, 64, 2, 4, 2, false, true, 2)
ATTENTION(attention_f16_d128, F16, 128, 2, 4, 2, false, true, 2)
// Fewer rows a block, so that a small call has blocks for every multiprocessor.
ATTENTION(attention_f16_d64_small, F16, 64, 1, 4, 2, true, true, 3)
ATTENTION(attention_f16_d128_small, F16, 128, 1, 4, 2, true, true, 2)
// Heads of any size up to the kernel's, at any alignment.
ATTENTION(attention_f16_any64, F16, 64, 1, 4, 2, true, false, 2)
ATTENTION(attention_f16_any128, F16, 128, 1, 4, 2, true, false, 1)
ATTENTION(attention_f16_any256, F16, 256, 1, 4, 1, false, false, 1)
