// All columns of attention's gradient at once, with the dot products of the output and the rotation back, for
// sequences of no more rows than a tile: blocks of queries first, then those of keys and values. Neither waits for the
// other, as both compute the dot products that they need.
#ifndef BITSTEP_ATTENTION_TENSOR_GRADS_CUH
#define BITSTEP_ATTENTION_TENSOR_GRADS_CUH

#include "attention_tensor_grad_key_value.cuh"
#include "attention_tensor_grad_query.cuh"

// Grid: batch · heads, then batch · key heads. Shared memory: the larger one of both passes'.
#define ATTENTION_GRADS(NAME, H, D, WARPS, HELD, BLOCKS)                                                          \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)                                              \
        NAME(const tensor::H::Element* qkv, const tensor::H::Element* dout, const float* lse,                     \
             const tensor::H::Element* o, float* delta, tensor::H::Element* dqkv, const float* table,             \
             unsigned turned, unsigned seq_len, unsigned n_heads, unsigned n_kv_heads, unsigned head_dim,         \
             float factor, float scale, unsigned of_queries) {                                                    \
        typedef tensor::GradQuery<tensor::H, D, WARPS, 64, HELD, true> Q;                                         \
        typedef tensor::GradKeyValue<tensor::H, D, D, WARPS, 64, 2, true> K;                                      \
        const tensor::Sizes<D, true> sizes = {(int)seq_len, (int)n_heads, (int)n_kv_heads, (int)head_dim};        \
        const tensor::WithDelta<tensor::H::Element> with = {table, turned, o, delta};                             \
        if (blockIdx.x < of_queries)                                                                              \
            tensor::grad_query<Q>({(int)blockIdx.x, 0, 1}, qkv, dout, lse, delta, dqkv, sizes, factor, scale,     \
                                  with);                                                                          \
        else                                                                                                      \
            tensor::grad_key_value<K>({(int)(blockIdx.x - of_queries), 0, 1}, qkv, dout, lse, delta, dqkv, sizes, \
                                      factor, scale, with);                                                       \
    }

#endif
