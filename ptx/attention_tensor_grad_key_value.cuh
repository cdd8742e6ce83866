// The key and value columns of attention's gradient in the tensor-core domains: src/op/attention.rs,
// `AttentionGradKeyValue`.
//
// A block owns keys and values of one key head and walks over the group's query heads and, within each, over the
// tiles of queries from its first key on. Rows are keys and columns queries, so p and ds come out as the left
// operands of their products.
#ifndef BITSTEP_ATTENTION_TENSOR_GRAD_KEY_VALUE_CUH
#define BITSTEP_ATTENTION_TENSOR_GRAD_KEY_VALUE_CUH

#include "attention_tensor_together.cuh"

namespace tensor {

// What a block is: 16 rows a warp, tiles of QUERIES queries in STAGES stages, and C of the head's D columns of the
// result; blocks of all C columns of a head are neighbours in z.
template <class Format, int COLUMNS, int C_, int WARPS_, int QUERIES_, int STAGES_, bool EXACT_>
struct GradKeyValue {
    typedef Format H;
    static constexpr int D = COLUMNS, C = C_, WARPS = WARPS_, QUERIES = QUERIES_, STAGES = STAGES_;
    static constexpr bool EXACT = EXACT_;
    static constexpr int ROWS = 16 * WARPS, THREADS = 32 * WARPS;
    typedef Rows<H, D> R;
};

// Grid: (batch · key heads, blocks of keys, the first ones first, D / C). Shared memory: keys, values, and the stages
// of queries, their output's gradients, `lse` and `delta`.
//
// With::DELTA asks that the sequence has no more rows than a tile. A step is then a head of the group, of which the
// first two are loaded at once, and the statistics of all stand behind the stages.
template <class G, class With>
__device__ __forceinline__ void grad_key_value(const Place& place, const typename G::H::Element* qkv,
                                               const typename G::H::Element* dout, const float* lse,
                                               const float* delta, typename G::H::Element* dqkv,
                                               const Sizes<G::D, G::EXACT>& sizes, float factor, float scale,
                                               const With& with) {
    typedef typename G::H H;
    typedef typename G::R R;
    typedef typename H::Element Element;
    constexpr int D = G::D, C = G::C, THREADS = G::THREADS, QUERIES = G::QUERIES;
    extern __shared__ __align__(128) char raw[];
    char* const shared = aligned(raw);
    constexpr int OWN = G::ROWS * R::BYTES, HALF = QUERIES * R::BYTES, STAGE = 2 * HALF + 8 * QUERIES;
    char *const keys = shared, *const values = shared + OWN, *const stages = shared + 2 * OWN;

    const int d = sizes.dim(), seq_len = sizes.seq_len, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int kv_head = place.x % sizes.n_kv_heads, first_column = C < D ? blockIdx.z * C : 0;
    const size_t sequence = (size_t)(place.x / sizes.n_kv_heads) * seq_len;
    const int first = place.y * G::ROWS;
    const int count = first + G::ROWS < seq_len ? G::ROWS : seq_len - first;
    const int group = sizes.n_heads / sizes.n_kv_heads;
    const size_t columns = sizes.columns(), query_columns = sizes.query_columns();
    const size_t key_column = (size_t)(sizes.n_heads + kv_head) * d;
    const size_t value_column = key_column + (size_t)sizes.n_kv_heads * d;
    // Steps number the tiles of all heads of the group.
    const int per_head = (seq_len - first + QUERIES - 1) / QUERIES, steps = group * per_head;

    auto load = [&](char* to, const Element* from, size_t stride, int rows, int count) {
        load_rows<H, D, THREADS, G::EXACT>(to, from, stride, rows, count, d);
    };
    auto stage = [&](int step) { return stages + (G::STAGES == 2 && (step & 1) ? STAGE : 0); };
    auto query_of = [&](int step) { return first + step % per_head * QUERIES; };
    auto load_tile = [&](int step) {
        if (step < steps) {
            const int head = kv_head * group + step / per_head, query = query_of(step);
            const int n = seq_len - query < QUERIES ? seq_len - query : QUERIES;
            char* const to = stage(step);
            load(to, qkv + (sequence + query) * columns + (size_t)head * d, columns, QUERIES, n);
            load(to + HALF, dout + (sequence + query) * query_columns + (size_t)head * d, query_columns, QUERIES, n);
            if constexpr (With::DELTA) return copy_async_commit();
            float* const statistics = (float*)(to + 2 * HALF);
            for (int i = threadIdx.x; i < 2 * QUERIES; i += THREADS) {
                const int q = i % QUERIES;
                const float* const from = (i < QUERIES ? lse : delta) + (sequence + query) * sizes.n_heads + head;
                copy_async_4(statistics + i, from + (q < n ? (size_t)q * sizes.n_heads : 0), q < n);
            }
        }
        copy_async_commit();
    };
    const Element* const own_rows = qkv + (sequence + first) * columns;
    load(keys, own_rows + key_column, columns, G::ROWS, count);
    load(values, own_rows + value_column, columns, G::ROWS, count);
    float* const all_statistics = (float*)(stages + 2 * STAGE);
    if constexpr (With::DELTA) {
        static_assert(G::STAGES == 2, "the first two heads are loaded at once");
        for (int i = threadIdx.x; i < group * QUERIES; i += THREADS) {
            const int q = i % QUERIES, head = kv_head * group + i / QUERIES;
            const float* const from = lse + sequence * sizes.n_heads + head;
            copy_async_4(all_statistics + i / QUERIES * 2 * QUERIES + q,
                         from + (q < seq_len ? (size_t)q * sizes.n_heads : 0), q < seq_len);
        }
    }
    load_tile(0);
    if constexpr (With::DELTA) {
        load_tile(1);
        // Of all queries of a part, as those behind the end have +0.0.
        const int slabs = (seq_len + PART - 1) / PART * (PART / 16);
        for (int i = warp; i < group * slabs; i += G::WARPS) {
            const int head = i / slabs, q = i % slabs * 16 + (lane >> 2);
            const size_t from = (sequence + i % slabs * 16) * query_columns + (size_t)(kv_head * group + head) * d;
            float dots_of_rows[2];
            row_dots<H, D>(dots_of_rows, dout + from, with.o + from, query_columns, seq_len - i % slabs * 16);
#pragma unroll
            for (int h = 0; h < 2; h++)
                if ((lane & 3) == 0) all_statistics[(2 * head + 1) * QUERIES + q + 8 * h] = dots_of_rows[h];
        }
    }

    const int first_row = first + 16 * warp, row = first_row + (lane >> 2);
    const Address own_k = R::left(address_of(keys) + 16 * warp * R::BYTES), own_v = own_k + OWN;
    auto left_k = [&](int k, unsigned(&a)[4]) { load_matrices(a, R::step(own_k, k)); };
    auto left_v = [&](int k, unsigned(&a)[4]) { load_matrices(a, R::step(own_v, k)); };
    float dk[1][C / 8][4], dv[1][C / 8][4];
#pragma unroll
    for (int n = 0; n < C / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) dk[0][n][e] = dv[0][n][e] = 0.0f;

    // A part of a tile. Queries behind the sequence's end are zeros, so whatever p and ds are for them, their
    // products are zeros.
    auto part = [&](Address queries, const float* statistics, int first_query) {
        const bool diagonal = first_query < first_row + 15;
        float s[1][PART / 8][4], dp[1][PART / 8][4];
        const int column = 2 * (lane & 3);
        fill<PART / 8>(s[0], 0.0f);
        dots<H, D, PART / 8>(s[0], R::right(queries), PART / 16, left_k);
#pragma unroll
        for (int n = 0; n < PART / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                dp[0][n][e] = contract::negate(statistics[QUERIES + 8 * n + column + (e & 1)]);
        dots<H, D, PART / 8>(dp[0], R::right(queries + HALF), PART / 16, left_v);
        probabilities(s[0], contract::negate(factor),
                      [&](int n, int e) { return statistics[8 * n + column + (e & 1)]; });
        score_grads(dp[0], s[0]);
        const int ahead = row - first_query - column;
        if (diagonal) hide_pairs(s[0], dp[0], [&](int n, int e) { return ahead + 8 * (e >> 1) > 8 * n + (e & 1); });
        chains<H, D, C, PART / 8, 1>(dv, s, along<H, D>(queries + HALF), PART / 16, first_column);
        chains<H, D, C, PART / 8, 1>(dk, dp, along<H, D>(queries), PART / 16, first_column);
    };
    for (int step = 0; step < steps; step++) {
        copy_async_wait<With::DELTA ? 1 : 0>();
        settle<H, D, THREADS>(stage(step), 2 * QUERIES);
        if (step == 0) settle<H, D, THREADS>(keys, 2 * G::ROWS);
        __syncthreads();
        if (G::STAGES == 2 && !With::DELTA) load_tile(step + 1);
        const Address queries = address_of(stage(step));
        const float* const statistics =
            With::DELTA ? all_statistics + step * 2 * QUERIES : (const float*)(stage(step) + 2 * HALF);
        const int query = query_of(step);
#pragma unroll 1
        for (int at = 0; at < QUERIES; at += PART) {
            const int first_query = query + at;
            if (first_row >= seq_len || first_query >= seq_len || first_query + PART <= first_row) continue;
            part(queries + at * R::BYTES, statistics + at, first_query);
        }
        if constexpr (G::STAGES == 1) {
            __syncthreads();
            load_tile(step + 1);
        }
        if constexpr (With::DELTA) {
            if (step + 2 < steps) __syncthreads();
            load_tile(step + 2);
        }
    }

    Angles<D> angles;
    load_angles(angles, row, seq_len, with);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (row + 8 * h >= seq_len) continue;
        Element* const to = dqkv + (sequence + row + 8 * h) * columns;
        if constexpr (With::TURN)
            store_gradient<H, D, G::EXACT>(to + key_column, dk[0], h, scale, d, angles, with);
        else
            store_row<H, C, G::EXACT>(to + key_column, dk[0], h, scale, first_column, d);
        store_row<H, C, G::EXACT>(to + value_column, dv[0], h, 1.0f, first_column, d);
    }
}

}  // namespace tensor

#define ATTENTION_GRAD_KEY_VALUE(NAME, H, D, C, WARPS, QUERIES, STAGES, EXACT, BLOCKS)                            \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)                                              \
        NAME(const tensor::H::Element* qkv, const tensor::H::Element* dout, const float* lse, const float* delta, \
             tensor::H::Element* dqkv, unsigned seq_len, unsigned n_heads, unsigned n_kv_heads,                   \
             unsigned head_dim, float factor, float scale) {                                                                    \
        typedef tensor::GradKeyValue<tensor::H, D, C, WARPS, QUERIES, STAGES, EXACT> G;                           \
        const tensor::Sizes<D, EXACT> sizes = {(int)seq_len, (int)n_heads, (int)n_kv_heads, (int)head_dim};       \
        tensor::grad_key_value<G>(tensor::place_in_grid(), qkv, dout, lse, delta, dqkv, sizes, factor, scale,     \
                                  tensor::Alone());                                                               \
    }

// Rotates the keys' gradient back.
#define ATTENTION_GRAD_KEY_VALUE_TURNED(NAME, H, D, WARPS, QUERIES, BLOCKS)                                       \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)                                              \
        NAME(const tensor::H::Element* qkv, const tensor::H::Element* dout, const float* lse, const float* delta, \
             tensor::H::Element* dqkv, const float* table, unsigned seq_len, unsigned n_heads,                    \
             unsigned n_kv_heads, unsigned head_dim, float factor, float scale) {                                 \
        typedef tensor::GradKeyValue<tensor::H, D, D, WARPS, QUERIES, 2, true> G;                                 \
        const tensor::Sizes<D, true> sizes = {(int)seq_len, (int)n_heads, (int)n_kv_heads, (int)head_dim};        \
        tensor::grad_key_value<G>(tensor::place_in_grid(), qkv, dout, lse, delta, dqkv, sizes, factor, scale,     \
                                  tensor::Turning{table, 1});                                                     \
    }

#endif
