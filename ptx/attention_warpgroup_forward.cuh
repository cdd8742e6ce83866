// Causal attention with wgmma, the forward pass: src/op/attention.rs, `Attention`.
//
// A block is GROUPS warpgroups of 64 queries each, which walk over the tiles of keys together, up to the diagonal. The
// product with the values is still under way when the next tile's scores begin.
#ifndef BITSTEP_ATTENTION_WARPGROUP_FORWARD_CUH
#define BITSTEP_ATTENTION_WARPGROUP_FORWARD_CUH

#include "attention_tensor_forward.cuh"
#include "attention_warpgroup.cuh"

namespace tensor {

// STAGES - 2 tiles are loaded ahead: one stage is worked on, and one may still be read by the former product.
template <class Format, int COLUMNS, int GROUPS_, int STAGES_>
struct GroupForward {
    typedef Format H;
    static constexpr int D = COLUMNS, GROUPS = GROUPS_, STAGES = STAGES_, AHEAD = STAGES - 2;
    static constexpr int THREADS = GROUPS * GROUP_THREADS, TILE_BYTES = D / 64 * PANEL;
};

// Grid: (batch · heads, blocks of queries, the last ones first). Shared memory: queries, then the stages of keys and
// values.
template <class F>
__device__ __forceinline__ void group_forward(const typename F::H::Element* qkv, typename F::H::Element* o, float* lse,
                                              const Sizes<F::D, true>& sizes, float minus_k) {
    typedef typename F::H H;
    constexpr int D = F::D;
    extern __shared__ __align__(128) char raw[];
    char* const queries = panels(raw);
    char* const stages = queries + F::GROUPS * F::TILE_BYTES;

    const int seq_len = sizes.seq_len, group = threadIdx.x / GROUP_THREADS;
    const int head = blockIdx.x % sizes.n_heads;
    const size_t sequence = (size_t)(blockIdx.x / sizes.n_heads) * seq_len;
    const int kv_head = head / (sizes.n_heads / sizes.n_kv_heads);
    const size_t columns = sizes.columns();
    const typename H::Element* const k_from = qkv + sequence * columns + (size_t)(sizes.n_heads + kv_head) * D;
    const typename H::Element* const v_from = k_from + (size_t)sizes.n_kv_heads * D;
    // Tiles of rows are dealt out from the end; the groups that are left over in the last block have none.
    const int last = (seq_len + TILE - 1) / TILE - 1 - (int)blockIdx.y * F::GROUPS;
    const int own = last - (F::GROUPS - 1) + group, tiles = last + 1;

    auto stage = [&](int tile) { return stages + tile % F::STAGES * 2 * F::TILE_BYTES; };
    auto load = [&](int tile) {
        if (tile < tiles) {
            const size_t at = (size_t)tile * TILE * columns;
            const int count = seq_len - tile * TILE;
            load_tile<H, D, F::THREADS>(stage(tile), k_from + at, columns, count, threadIdx.x);
            load_tile<H, D, F::THREADS>(stage(tile) + F::TILE_BYTES, v_from + at, columns, count, threadIdx.x);
        }
        copy_async_commit();
    };
    char* const mine = queries + group * F::TILE_BYTES;
    if (own >= 0)
        load_tile<H, D, GROUP_THREADS>(mine, qkv + (sequence + (size_t)own * TILE) * columns + (size_t)head * D, columns,
                                       seq_len - own * TILE, threadIdx.x % GROUP_THREADS);
#pragma unroll
    for (int tile = 0; tile < F::AHEAD; tile++) load(tile);

    const Descriptor own_queries = descriptor(address_of(mine));
    Carried<D, 1> carried;
    carried.clear();
    const int first_row = own * TILE + 16 * (threadIdx.x >> 5 & 3);
    for (int tile = 0; tile < tiles; tile++) {
        copy_async_wait<F::AHEAD - 1>();
        publish();
        __syncthreads();
        load(tile + F::AHEAD);
        if (tile > own) {
            // The last product's tile will be loaded over.
            wait_products<0>();
            continue;
        }
        const Descriptor keys = descriptor(address_of(stage(tile))), values = moved(keys, F::TILE_BYTES);
        float s[1][8][4];
        begin_products();
        dot_tiles<H, D, true>(s[0], own_queries, keys);
        commit_products();
        wait_products<0>();
        settled(s[0]);
        settled(carried.acc[0]);
        if (tile == own) hide<1>(s, tile * TILE, first_row);
        softmax<D, 1>(s, carried, minus_k);
        unsigned p[4][4];
        operands<H>(p, s[0]);
        begin_products();
        add_tile<H>(carried.acc[0], p, values);
        commit_products();
    }
    wait_products<0>();
    settled(carried.acc[0]);
    if (own < 0) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = carried.sum[0][h];
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
        const int row = first_row + 8 * h + ((threadIdx.x & 31) >> 2);
        if (row >= seq_len) continue;
        const size_t token = sequence + row;
        finish<H, D, true>(o + token * sizes.query_columns() + (size_t)head * D, lse + token * sizes.n_heads + head,
                           carried.acc[0], h, sum, carried.reference[0][h], D);
    }
}

}  // namespace tensor

#define GROUP_ATTENTION(NAME, H, D, GROUPS, STAGES, BLOCKS)                                                       \
    extern "C" __global__ void __launch_bounds__(128 * GROUPS, BLOCKS)                                            \
        NAME(const tensor::H::Element* qkv, tensor::H::Element* o, float* lse, unsigned seq_len,                  \
             unsigned n_heads, unsigned n_kv_heads, unsigned head_dim, float factor) {                            \
        typedef tensor::GroupForward<tensor::H, D, GROUPS, STAGES> F;                                             \
        const tensor::Sizes<D, true> sizes = {(int)seq_len, (int)n_heads, (int)n_kv_heads, (int)head_dim};        \
        tensor::group_forward<F>(qkv, o, lse, sizes, contract::negate(factor));                                   \
    }

#endif
