// The query columns of attention's gradient with wgmma: src/op/attention.rs, `AttentionGradQuery`.
//
// A block is GROUPS warpgroups of 64 queries each, which walk over the tiles of keys together, up to the diagonal.
// Probabilities are computed while the second product runs, and the third one runs on into the next tile.
#ifndef BITSTEP_ATTENTION_WARPGROUP_GRAD_QUERY_CUH
#define BITSTEP_ATTENTION_WARPGROUP_GRAD_QUERY_CUH

#include "attention_tensor_together.cuh"
#include "attention_warpgroup.cuh"

namespace tensor {

// STAGES - 2 tiles are loaded ahead: one stage is worked on, and one may still be read by the former product.
template <class Format, int COLUMNS, int GROUPS_, int STAGES_>
struct GroupGradQuery {
    typedef Format H;
    static constexpr int D = COLUMNS, GROUPS = GROUPS_, STAGES = STAGES_, AHEAD = STAGES - 2;
    static constexpr int THREADS = GROUPS * GROUP_THREADS, TILE_BYTES = D / 64 * PANEL;
};

// Grid: (batch · heads, blocks of queries, the last ones first). Shared memory: each group's queries and their
// output's gradients, then the stages of keys and values.
template <class F, class With>
__device__ __forceinline__ void group_grad_query(const typename F::H::Element* qkv, const typename F::H::Element* dout,
                                                 const float* lse, const float* delta, typename F::H::Element* dqkv,
                                                 const Sizes<F::D, true>& sizes, float minus_k, float scale,
                                                 const With& with) {
    typedef typename F::H H;
    constexpr int D = F::D;
    extern __shared__ __align__(128) char raw[];
    char* const owns = panels(raw);
    char* const stages = owns + F::GROUPS * 2 * F::TILE_BYTES;

    const int seq_len = sizes.seq_len, group = threadIdx.x / GROUP_THREADS, lane = threadIdx.x & 31;
    const int head = blockIdx.x % sizes.n_heads;
    const size_t sequence = (size_t)(blockIdx.x / sizes.n_heads) * seq_len;
    const int kv_head = head / (sizes.n_heads / sizes.n_kv_heads);
    const size_t columns = sizes.columns(), query_columns = sizes.query_columns();
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
    char* const mine = owns + group * 2 * F::TILE_BYTES;
    const int row = own * TILE + 16 * (threadIdx.x >> 5 & 3) + (lane >> 2);
    float statistic[2] = {0.0f, 0.0f}, row_delta[2] = {0.0f, 0.0f};
    if (own >= 0) {
        const size_t token = sequence + (size_t)own * TILE;
        const int count = seq_len - own * TILE, thread = threadIdx.x % GROUP_THREADS;
        load_tile<H, D, GROUP_THREADS>(mine, qkv + token * columns + (size_t)head * D, columns, count, thread);
        load_tile<H, D, GROUP_THREADS>(mine + F::TILE_BYTES, dout + token * query_columns + (size_t)head * D,
                                       query_columns, count, thread);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (row + 8 * h >= seq_len) continue;
            const size_t at = (sequence + row + 8 * h) * sizes.n_heads + head;
            statistic[h] = lse[at];
            if constexpr (!With::DELTA) row_delta[h] = contract::negate(delta[at]);
        }
    }
#pragma unroll
    for (int tile = 0; tile < F::AHEAD; tile++) load(tile);
    if constexpr (With::DELTA) {
        // While the tiles are on their way.
        if (own >= 0) {
            const int first_row = own * TILE + 16 * (threadIdx.x >> 5 & 3);
            const size_t from = (sequence + first_row) * query_columns + (size_t)head * D;
            row_dots<H, D>(row_delta, dout + from, with.o + from, query_columns, seq_len - first_row);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if ((lane & 3) == 0 && row + 8 * h < seq_len)
                    with.delta[(sequence + row + 8 * h) * sizes.n_heads + head] = row_delta[h];
                row_delta[h] = contract::negate(row_delta[h]);
            }
        }
    }

    const Descriptor queries = descriptor(address_of(mine)), douts = moved(queries, F::TILE_BYTES);
    float dq[D / 8][4];
    fill<D / 8>(dq, 0.0f);
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
        float s[8][4], dp[8][4];
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) dp[n][e] = row_delta[e >> 1];
        settled(dp);
        begin_products();
        dot_tiles<H, D, true>(s, queries, keys);
        commit_products();
        dot_tiles<H, D, false>(dp, douts, values);
        commit_products();
        wait_products<1>();
        settled(s);
        probabilities(s, minus_k, [&](int, int e) { return statistic[e >> 1]; });
        wait_products<0>();
        settled(dp);
        settled(dq);
        score_grads(dp, s);
        const int ahead = tile * TILE + 2 * (lane & 3) - row;
        if (tile == own) hide_pairs(s, dp, [&](int n, int e) { return ahead + 8 * n + (e & 1) > 8 * (e >> 1); });
        unsigned ds[4][4];
        operands<H>(ds, dp);
        begin_products();
        add_tile<H>(dq, ds, keys);
        commit_products();
    }
    Angles<D> angles;
    if (own >= 0) load_angles(angles, row, seq_len, with);
    wait_products<0>();
    settled(dq);
    if (own < 0) return;
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (row + 8 * h < seq_len)
            store_gradient<H, D, true>(dqkv + (sequence + row + 8 * h) * columns + (size_t)head * D, dq, h, scale, D,
                                       angles, with);
}

}  // namespace tensor

#define GROUP_GRAD_QUERY(NAME, H, D, GROUPS, STAGES, BLOCKS)                                                      \
    extern "C" __global__ void __launch_bounds__(128 * GROUPS, BLOCKS)                                            \
        NAME(const tensor::H::Element* qkv, const tensor::H::Element* dout, const float* lse, const float* delta, \
             tensor::H::Element* dqkv, unsigned seq_len, unsigned n_heads, unsigned n_kv_heads,                   \
             unsigned head_dim, float factor, float scale) {                                                      \
        typedef tensor::GroupGradQuery<tensor::H, D, GROUPS, STAGES> F;                                           \
        const tensor::Sizes<D, true> sizes = {(int)seq_len, (int)n_heads, (int)n_kv_heads, (int)head_dim};        \
        tensor::group_grad_query<F>(qkv, dout, lse, delta, dqkv, sizes, contract::negate(factor), scale,          \
                                    tensor::Alone());                                                             \
    }

// Computes the dot products of the output as well, and rotates the gradient back if `turned`.
#define GROUP_GRAD_QUERY_WITH_DELTA(NAME, H, D, GROUPS, STAGES, BLOCKS)                                           \
    extern "C" __global__ void __launch_bounds__(128 * GROUPS, BLOCKS)                                            \
        NAME(const tensor::H::Element* qkv, const tensor::H::Element* dout, const float* lse,                     \
             const tensor::H::Element* o, float* delta, tensor::H::Element* dqkv, const float* table,             \
             unsigned turned, unsigned seq_len, unsigned n_heads, unsigned n_kv_heads, unsigned head_dim,         \
             float factor, float scale) {                                                                         \
        typedef tensor::GroupGradQuery<tensor::H, D, GROUPS, STAGES> F;                                           \
        const tensor::Sizes<D, true> sizes = {(int)seq_len, (int)n_heads, (int)n_kv_heads, (int)head_dim};        \
        const tensor::WithDelta<tensor::H::Element> with = {table, turned, o, delta};                             \
        tensor::group_grad_query<F>(qkv, dout, lse, delta, dqkv, sizes, contract::negate(factor), scale, with);   \
    }

#endif
