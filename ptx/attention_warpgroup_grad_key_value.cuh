// The key and value columns of attention's gradient with wgmma: src/op/attention.rs, `AttentionGradKeyValue`.
//
// A block is GROUPS warpgroups of 64 keys each, which walk over the group's query heads and, within each, over the
// tiles of queries from their own on. Rows are keys and columns queries. Probabilities are computed while the second
// product runs, their product with the gradients while `ds` is; the last one runs on into the next tile.
#ifndef BITSTEP_ATTENTION_WARPGROUP_GRAD_KEY_VALUE_CUH
#define BITSTEP_ATTENTION_WARPGROUP_GRAD_KEY_VALUE_CUH

#include "attention_tensor_together.cuh"
#include "attention_warpgroup_kept.cuh"

namespace tensor {

// STAGES - 2 tiles are loaded ahead: one stage is worked on, and one may still be read by the former product.
template <class Format, int COLUMNS, int GROUPS_, int STAGES_>
struct GroupGradKeyValue {
    typedef Format H;
    static constexpr int D = COLUMNS, GROUPS = GROUPS_, STAGES = STAGES_, AHEAD = STAGES - 2;
    static constexpr int THREADS = GROUPS * GROUP_THREADS, TILE_BYTES = D / 64 * PANEL;
};

// As Turning, and where the rounded `ds` of every tile goes for the query pass that takes it from there.
struct Keeping {
    static constexpr bool DELTA = false, TURN = true;
    const float* table;
    unsigned turned;
    char* kept;
};

template <class With>
struct Keeps {
    static constexpr bool VALUE = false;
};
template <>
struct Keeps<Keeping> {
    static constexpr bool VALUE = true;
};

// Grid: (batch · key heads, blocks of keys, the first ones first). Shared memory: each group's keys and values, the
// stages of queries and their output's gradients, and the stages of `lse` and `delta`.
template <class F, class With>
__device__ __forceinline__ void group_grad_key_value(const typename F::H::Element* qkv,
                                                     const typename F::H::Element* dout, const float* lse,
                                                     const float* delta, typename F::H::Element* dqkv,
                                                     const Sizes<F::D, true>& sizes, float minus_k, float scale,
                                                     const With& with) {
    typedef typename F::H H;
    typedef typename H::Element Element;
    constexpr int D = F::D;
    extern __shared__ __align__(128) char raw[];
    char* const owns = panels(raw);
    char* const stages = owns + F::GROUPS * 2 * F::TILE_BYTES;
    float* const statistics = (float*)(stages + F::STAGES * 2 * F::TILE_BYTES);

    const int seq_len = sizes.seq_len, group = threadIdx.x / GROUP_THREADS, lane = threadIdx.x & 31;
    const int kv_head = blockIdx.x % sizes.n_kv_heads, heads = sizes.n_heads / sizes.n_kv_heads;
    const size_t sequence = (size_t)(blockIdx.x / sizes.n_kv_heads) * seq_len;
    const size_t columns = sizes.columns(), query_columns = sizes.query_columns();
    const size_t key_column = (size_t)(sizes.n_heads + kv_head) * D;
    const size_t value_column = key_column + (size_t)sizes.n_kv_heads * D;
    // Steps number the tiles of queries of all heads of the group.
    const int all = (seq_len + TILE - 1) / TILE, first = (int)blockIdx.y * F::GROUPS, own = first + group;
    const int per_head = all - first, steps = heads * per_head;

    auto stage = [&](int step) { return stages + step % F::STAGES * 2 * F::TILE_BYTES; };
    auto row_values = [&](int step) { return statistics + step % F::STAGES * 2 * TILE; };
    auto load = [&](int step) {
        if (step < steps) {
            const int head = kv_head * heads + step / per_head, query = (first + step % per_head) * TILE;
            const size_t token = sequence + query;
            const int count = seq_len - query;
            load_tile<H, D, F::THREADS>(stage(step), qkv + token * columns + (size_t)head * D, columns, count,
                                        threadIdx.x);
            load_tile<H, D, F::THREADS>(stage(step) + F::TILE_BYTES, dout + token * query_columns + (size_t)head * D,
                                        query_columns, count, threadIdx.x);
            if (threadIdx.x < 2 * TILE) {
                const int q = threadIdx.x % TILE;
                const float* const from = (threadIdx.x < TILE ? lse : delta) + token * sizes.n_heads + head;
                copy_async_4(row_values(step) + threadIdx.x, from + (q < count ? (size_t)q * sizes.n_heads : 0),
                             q < count);
            }
        }
        copy_async_commit();
    };
    char* const mine = owns + group * 2 * F::TILE_BYTES;
    if (own < all) {
        const Element* const from = qkv + (sequence + (size_t)own * TILE) * columns;
        const int count = seq_len - own * TILE, thread = threadIdx.x % GROUP_THREADS;
        load_tile<H, D, GROUP_THREADS>(mine, from + key_column, columns, count, thread);
        load_tile<H, D, GROUP_THREADS>(mine + F::TILE_BYTES, from + value_column, columns, count, thread);
    }
#pragma unroll
    for (int step = 0; step < F::AHEAD; step++) load(step);

    const Descriptor keys = descriptor(address_of(mine)), values = moved(keys, F::TILE_BYTES);
    const int row = own * TILE + 16 * (threadIdx.x >> 5 & 3) + (lane >> 2), column = 2 * (lane & 3);
    float dk[D / 8][4], dv[D / 8][4];
    fill<D / 8>(dk, 0.0f);
    fill<D / 8>(dv, 0.0f);

    // One tile. On the diagonal pairs are hidden without a branch, as products are under way.
    auto attend = [&](auto diagonal, int step, int tile) {
        constexpr bool DIAGONAL = decltype(diagonal)::VALUE;
        const Descriptor queries = descriptor(address_of(stage(step))), douts = moved(queries, F::TILE_BYTES);
        const float* const of_query = row_values(step);
        const int ahead = row - tile * TILE - column;
        auto hidden = [&](int n, int e) { return DIAGONAL && ahead + 8 * (e >> 1) > 8 * n + (e & 1); };
        float s[8][4], dp[8][4];
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float2 x = *(const float2*)(of_query + TILE + 8 * n + column);
            dp[n][0] = dp[n][2] = contract::negate(x.x);
            dp[n][1] = dp[n][3] = contract::negate(x.y);
        }
        settled(dp);
        begin_products();
        dot_tiles<H, D, true>(s, keys, queries);
        commit_products();
        dot_tiles<H, D, false>(dp, values, douts);
        commit_products();
        wait_products<1>();
        settled(s);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float2 x = *(const float2*)(of_query + 8 * n + column);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[n][e] = score_weight(s[n][e], minus_k, e & 1 ? x.y : x.x);
                if (hidden(n, e)) s[n][e] = 0.0f;
            }
        }
        unsigned a[4][4], b[4][4];
        operands<H>(a, s);
        begin_products();
        add_tile<H>(dv, a, douts);
        commit_products();
        wait_products<1>();
        settled(dp);
        score_grads(dp, s);
        hide_pairs(s, dp, hidden);
        operands<H>(b, dp);
        begin_products();
        add_tile<H>(dk, b, queries);
        commit_products();
        if constexpr (Keeps<With>::VALUE) {
            // While products are under way, registers do not suffice for these stores as well.
            wait_products<0>();
            settled(dk);
            settled(dv);
            const int head = kv_head * heads + step / per_head;
            keep_tile(with.kept + kept_at(blockIdx.x / sizes.n_kv_heads * sizes.n_heads + head, all, tile, own), b);
        }
    };
    int tile = first - 1;
    for (int step = 0; step < steps; step++) {
        tile = tile + 1 == all ? first : tile + 1;
        copy_async_wait<F::AHEAD - 1>();
        publish();
        __syncthreads();
        load(step + F::AHEAD);
        wait_products<0>();
        settled(dk);
        settled(dv);
        // Queries behind the sequence's end are zeros, so whatever p and ds are for them, their products are zeros.
        if (own >= all) continue;
        if (tile == own)
            attend(Yes{}, step, tile);
        else if (tile > own)
            attend(No{}, step, tile);
    }
    Angles<D> angles;
    if (own < all) load_angles(angles, row, seq_len, with);
    wait_products<0>();
    settled(dk);
    settled(dv);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (own >= all || row + 8 * h >= seq_len) continue;
        Element* const to = dqkv + (sequence + row + 8 * h) * columns;
        store_gradient<H, D, true>(to + key_column, dk, h, scale, D, angles, with);
        store_row<H, D, true>(to + value_column, dv, h, 1.0f, 0, D);
    }
}

}  // namespace tensor

#define GROUP_GRAD_KEY_VALUE(NAME, H, D, GROUPS, STAGES, BLOCKS)                                                  \
    extern "C" __global__ void __launch_bounds__(128 * GROUPS, BLOCKS)                                            \
        NAME(const tensor::H::Element* qkv, const tensor::H::Element* dout, const float* lse, const float* delta, \
             tensor::H::Element* dqkv, unsigned seq_len, unsigned n_heads, unsigned n_kv_heads,                   \
             unsigned head_dim, float factor, float scale) {                                                      \
        typedef tensor::GroupGradKeyValue<tensor::H, D, GROUPS, STAGES> F;                                        \
        const tensor::Sizes<D, true> sizes = {(int)seq_len, (int)n_heads, (int)n_kv_heads, (int)head_dim};        \
        tensor::group_grad_key_value<F>(qkv, dout, lse, delta, dqkv, sizes, contract::negate(factor), scale,      \
                                        tensor::Alone());                                                         \
    }

// Rotates the keys' gradient back.
#define GROUP_GRAD_KEY_VALUE_TURNED(NAME, H, D, GROUPS, STAGES, BLOCKS)                                           \
    extern "C" __global__ void __launch_bounds__(128 * GROUPS, BLOCKS)                                            \
        NAME(const tensor::H::Element* qkv, const tensor::H::Element* dout, const float* lse, const float* delta, \
             tensor::H::Element* dqkv, const float* table, unsigned seq_len, unsigned n_heads,                    \
             unsigned n_kv_heads, unsigned head_dim, float factor, float scale) {                                 \
        typedef tensor::GroupGradKeyValue<tensor::H, D, GROUPS, STAGES> F;                                        \
        const tensor::Sizes<D, true> sizes = {(int)seq_len, (int)n_heads, (int)n_kv_heads, (int)head_dim};        \
        tensor::group_grad_key_value<F>(qkv, dout, lse, delta, dqkv, sizes, contract::negate(factor), scale,      \
                                        tensor::Turning{table, 1});                                               \
    }

// Keeps `ds` as well, and rotates the keys' gradient back if `turned`.
#define GROUP_GRAD_KEY_VALUE_KEEPING(NAME, H, D, GROUPS, STAGES, BLOCKS)                                          \
    extern "C" __global__ void __launch_bounds__(128 * GROUPS, BLOCKS)                                            \
        NAME(const tensor::H::Element* qkv, const tensor::H::Element* dout, const float* lse, const float* delta, \
             tensor::H::Element* dqkv, const float* table, unsigned turned, char* kept, unsigned seq_len,         \
             unsigned n_heads, unsigned n_kv_heads, unsigned head_dim, float factor, float scale) {               \
        typedef tensor::GroupGradKeyValue<tensor::H, D, GROUPS, STAGES> F;                                        \
        const tensor::Sizes<D, true> sizes = {(int)seq_len, (int)n_heads, (int)n_kv_heads, (int)head_dim};        \
        tensor::group_grad_key_value<F>(qkv, dout, lse, delta, dqkv, sizes, contract::negate(factor), scale,      \
                                        tensor::Keeping{table, turned, kept});                                    \
    }

#endif
