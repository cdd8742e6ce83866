// The query columns of attention's gradient in the tensor-core domains: src/op/attention.rs, `AttentionGradQuery`.
//
// A block owns queries of one head and walks over the tiles of keys, of which the next is loaded while the present
// one is worked on.
#ifndef BITSTEP_ATTENTION_TENSOR_GRAD_QUERY_CUH
#define BITSTEP_ATTENTION_TENSOR_GRAD_QUERY_CUH

#include "attention_tensor_together.cuh"

namespace tensor {

// What a block is: 16 rows a warp and tiles of KEYS keys; with HELD the own rows stay in registers.
template <class Format, int COLUMNS, int WARPS_, int KEYS_, bool HELD_, bool EXACT_>
struct GradQuery {
    typedef Format H;
    static constexpr int D = COLUMNS, WARPS = WARPS_, KEYS = KEYS_;
    static constexpr bool HELD = HELD_, EXACT = EXACT_;
    static constexpr int ROWS = 16 * WARPS, THREADS = 32 * WARPS;
    typedef Rows<H, D> R;
};

// Grid: (batch · heads, blocks of queries, the last ones first). Shared memory: queries, their output's gradients,
// and two stages of keys and values.
template <class G, class With>
__device__ __forceinline__ void grad_query(const Place& place, const typename G::H::Element* qkv,
                                           const typename G::H::Element* dout, const float* lse, const float* delta,
                                           typename G::H::Element* dqkv, const Sizes<G::D, G::EXACT>& sizes,
                                           float factor, float scale, const With& with) {
    typedef typename G::H H;
    typedef typename G::R R;
    typedef typename H::Element Element;
    constexpr int D = G::D, THREADS = G::THREADS;
    extern __shared__ __align__(128) char raw[];
    char* const shared = aligned(raw);
    constexpr int OWN = G::ROWS * R::BYTES, STAGE = 2 * G::KEYS * R::BYTES;
    char *const queries = shared, *const douts = shared + OWN, *const stages = shared + 2 * OWN;

    const int d = sizes.dim(), seq_len = sizes.seq_len, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int head = place.x % sizes.n_heads;
    const size_t sequence = (size_t)(place.x / sizes.n_heads) * seq_len;
    const int first = (place.of_y - 1 - place.y) * G::ROWS;
    const int end = first + G::ROWS < seq_len ? first + G::ROWS : seq_len;
    const int kv_head = head / (sizes.n_heads / sizes.n_kv_heads);
    const size_t columns = sizes.columns(), query_columns = sizes.query_columns();
    const Element* const k_from = qkv + sequence * columns + (size_t)(sizes.n_heads + kv_head) * d;
    const Element* const v_from = k_from + (size_t)sizes.n_kv_heads * d;
    const int tiles = (end + G::KEYS - 1) / G::KEYS;

    auto load = [&](char* to, const Element* from, size_t stride, int rows, int count) {
        load_rows<H, D, THREADS, G::EXACT>(to, from, stride, rows, count, d);
    };
    auto stage = [&](int tile) { return stages + (tile & 1 ? STAGE : 0); };
    auto load_tile = [&](int tile) {
        if (tile < tiles) {
            const int at = tile * G::KEYS, count = end - at < G::KEYS ? end - at : G::KEYS;
            load(stage(tile), k_from + at * columns, columns, G::KEYS, count);
            load(stage(tile) + STAGE / 2, v_from + at * columns, columns, G::KEYS, count);
        }
        copy_async_commit();
    };
    load(queries, qkv + (sequence + first) * columns + (size_t)head * d, columns, G::ROWS, end - first);
    load(douts, dout + (sequence + first) * query_columns + (size_t)head * d, query_columns, G::ROWS, end - first);
    load_tile(0);

    const int first_row = first + 16 * warp, row = first_row + (lane >> 2);
    float row_lse[2], row_delta[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const size_t at = (sequence + row + 8 * h) * sizes.n_heads + head;
        row_lse[h] = row + 8 * h < seq_len ? lse[at] : 0.0f;
        if constexpr (!With::DELTA) row_delta[h] = row + 8 * h < seq_len ? delta[at] : 0.0f;
    }
    if constexpr (With::DELTA) {
        const size_t from = (sequence + first_row) * query_columns + (size_t)head * d;
        row_dots<H, D>(row_delta, dout + from, with.o + from, query_columns, seq_len - first_row);
#pragma unroll
        for (int h = 0; h < 2; h++)
            if ((lane & 3) == 0 && row + 8 * h < seq_len)
                with.delta[(sequence + row + 8 * h) * sizes.n_heads + head] = row_delta[h];
    }
    const Address own_q = R::left(address_of(queries) + 16 * warp * R::BYTES), own_do = own_q + OWN;
    unsigned held_q[G::HELD ? R::STEPS : 1][4] = {}, held_do[G::HELD ? R::STEPS : 1][4] = {};
    auto left_q = [&](int k, unsigned(&a)[4]) {
        if constexpr (G::HELD) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = held_q[k][i];
        } else {
            load_matrices(a, R::step(own_q, k));
        }
    };
    auto left_do = [&](int k, unsigned(&a)[4]) {
        if constexpr (G::HELD) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = held_do[k][i];
        } else {
            load_matrices(a, R::step(own_do, k));
        }
    };

    float dq[1][D / 8][4];
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) dq[0][n][e] = 0.0f;

    // A part of a tile; on the diagonal only its first `groups` groups of 16 keys.
    auto part = [&](Address keys, int first_key) {
        const bool diagonal = first_key + PART > first_row;
        const int groups = diagonal ? (first_row - first_key) / 16 + 1 : PART / 16;
        float s[1][PART / 8][4], dp[1][PART / 8][4];
        fill<PART / 8>(s[0], 0.0f);
        dots<H, D, PART / 8>(s[0], R::right(keys), PART / 16, left_q);
#pragma unroll
        for (int n = 0; n < PART / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) dp[0][n][e] = contract::negate(row_delta[e >> 1]);
        dots<H, D, PART / 8>(dp[0], R::right(keys + STAGE / 2), PART / 16, left_do);
        probabilities(s[0], contract::negate(factor), [&](int, int e) { return row_lse[e >> 1]; });
        score_grads(dp[0], s[0]);
        const int ahead = first_key + 2 * (lane & 3) - row;
        if (diagonal) hide_pairs(s[0], dp[0], [&](int n, int e) { return ahead + 8 * n + (e & 1) > 8 * (e >> 1); });
        chains<H, D, D, PART / 8, 1>(dq, dp, along<H, D>(keys), groups, 0);
    };
    for (int tile = 0; tile < tiles; tile++) {
        copy_async_wait<0>();
        settle<H, D, THREADS>(stage(tile), 2 * G::KEYS);
        if (tile == 0) settle<H, D, THREADS>(queries, 2 * G::ROWS);
        __syncthreads();
        load_tile(tile + 1);
        if constexpr (G::HELD) {
            if (tile == 0) {
#pragma unroll
                for (int k = 0; k < R::STEPS; k++) {
                    load_matrices(held_q[k], R::step(own_q, k));
                    load_matrices(held_do[k], R::step(own_do, k));
                }
            }
        }
        if (first_row >= end) continue;
        const Address keys = address_of(stage(tile));
#pragma unroll 1
        for (int at = 0; at < G::KEYS; at += PART) {
            const int first_key = tile * G::KEYS + at;
            if (first_key <= first_row) part(keys + at * R::BYTES, first_key);
        }
    }

    Angles<D> angles;
    load_angles(angles, row, seq_len, with);
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (row + 8 * h < seq_len)
            store_gradient<H, D, G::EXACT>(dqkv + (sequence + row + 8 * h) * columns + (size_t)head * d, dq[0], h,
                                           scale, d, angles, with);
}

}  // namespace tensor

#define ATTENTION_GRAD_QUERY(NAME, H, D, WARPS, KEYS, HELD, EXACT, BLOCKS)                                        \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)                                              \
        NAME(const tensor::H::Element* qkv, const tensor::H::Element* dout, const float* lse, const float* delta, \
             tensor::H::Element* dqkv, unsigned seq_len, unsigned n_heads, unsigned n_kv_heads,                   \
             unsigned head_dim, float factor, float scale) {                                                      \
        typedef tensor::GradQuery<tensor::H, D, WARPS, KEYS, HELD, EXACT> G;                                      \
        const tensor::Sizes<D, EXACT> sizes = {(int)seq_len, (int)n_heads, (int)n_kv_heads, (int)head_dim};       \
        tensor::grad_query<G>(tensor::place_in_grid(), qkv, dout, lse, delta, dqkv, sizes, factor, scale,         \
                              tensor::Alone());                                                                   \
    }

// Computes the dot products of the output as well, and rotates the gradient back if `turned`.
#define ATTENTION_GRAD_QUERY_WITH_DELTA(NAME, H, D, WARPS, KEYS, HELD, BLOCKS)                                    \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)                                              \
        NAME(const tensor::H::Element* qkv, const tensor::H::Element* dout, const float* lse,                     \
             const tensor::H::Element* o, float* delta, tensor::H::Element* dqkv, const float* table,             \
             unsigned turned, unsigned seq_len, unsigned n_heads, unsigned n_kv_heads, unsigned head_dim,         \
             float factor, float scale) {                                                                         \
        typedef tensor::GradQuery<tensor::H, D, WARPS, KEYS, HELD, true> G;                                       \
        const tensor::Sizes<D, true> sizes = {(int)seq_len, (int)n_heads, (int)n_kv_heads, (int)head_dim};        \
        const tensor::WithDelta<tensor::H::Element> with = {table, turned, o, delta};                             \
        tensor::grad_query<G>(tensor::place_in_grid(), qkv, dout, lse, delta, dqkv, sizes, factor, scale, with);  \
    }

#endif
