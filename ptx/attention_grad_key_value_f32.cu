// The key and value columns of attention's gradient: src/op/attention.rs, `AttentionGradKeyValue`.
//
// A block owns keys and values of one key head and walks over the group's query heads and, within each,
// over the tiles of queries from its first key on.
#include "attention.cuh"

using namespace attention;

// A tile of queries in shared memory.
struct QueryTile {
    float* queries;
    float* douts;
    // `lse` of the tile's queries, then their `delta`.
    float* statistics;
};

// What a lane reads and writes of the block's own rows.
struct Own {
    const float* key;
    const float* value;
    float* p;
    float* ds;
};

// `p` and `ds` of a tile to the squares, from the products `dp` of values and output gradients.
template <int D, int RM, int CN>
__device__ __forceinline__ void score_grads(const Own& own, const QueryTile& tile, const float (&dp)[RM][8],
                                            const Place& at, float scale, int d) {
    float s[RM][8];
    dots<D, RM, CN>(s, own.key, tile.queries + at.column * row_floats(d), d);
#pragma unroll
    for (int i = 0; i < CN; i++) {
        float lse = tile.statistics[at.column + 8 * i], delta = tile.statistics[TILE + at.column + 8 * i];
#pragma unroll
        for (int r = 0; r < RM; r++) {
            float p = contract::exp(__fsub_rn(__fmul_rn(s[r][i], scale), lse));
            own.p[4 * r * SQUARE + 8 * i] = p;
            own.ds[4 * r * SQUARE + 8 * i] = __fmul_rn(p, __fsub_rn(dp[r][i], delta));
        }
    }
}

// Grid: (batch · key heads, blocks of keys, the first ones first). Shared memory: keys, values, the tiles
// of queries and the two squares. With one tile the loads of its parts run under the products that do not
// need them; with two the whole next tile is loaded under the present one.
template <int D, int RM, int WARPS, int TILES>
__device__ __forceinline__ void grad_key_value(const float* qkv, const float* dout, const float* lse,
                                               const float* delta, float* dqkv, const Sizes<D>& sizes, float scale) {
    constexpr int ROWS = 4 * RM * WARPS, THREADS = 32 * WARPS;
    extern __shared__ __align__(16) float shared[];
    const int d = sizes.dim(), stride = sizes.stride(), seq_len = sizes.seq_len;
    float* const keys = shared;
    float* const values = keys + ROWS * stride;
    float* const tiles = values + ROWS * stride;
    const int tile_floats = 2 * TILE * stride + 2 * TILE;
    float* const squares = tiles + TILES * tile_floats;

    const Place at = place();
    const int kv_head = blockIdx.x % sizes.n_kv_heads;
    const size_t sequence = (size_t)(blockIdx.x / sizes.n_kv_heads) * seq_len;
    const int first = (int)blockIdx.y * ROWS;
    const int count = first + ROWS < seq_len ? ROWS : seq_len - first;
    const int group = sizes.n_heads / sizes.n_kv_heads;
    const size_t columns = sizes.columns(), query_columns = sizes.query_columns();
    const size_t key_column = (size_t)(sizes.n_heads + kv_head) * d;
    const size_t value_column = key_column + (size_t)sizes.n_kv_heads * d;
    const float* const own_rows = qkv + (sequence + first) * columns;

    // Steps number the tiles of all heads of the group.
    const int per_head = (seq_len - first + TILE - 1) / TILE, steps = group * per_head;
    auto tile_of = [&](int step) {
        float* base = tiles + (TILES > 1 && (step & 1) ? tile_floats : 0);
        return QueryTile{base, base + TILE * stride, base + 2 * TILE * stride};
    };
    auto query_of = [&](int step) { return first + step % per_head * TILE; };
    auto count_of = [&](int query) { return seq_len - query < TILE ? seq_len - query : TILE; };
    auto load_douts = [&](int step) {
        if (step >= steps) return;
        int head = kv_head * group + step / per_head, query = query_of(step), n = count_of(query);
        const float* from = dout + (sequence + query) * query_columns + (size_t)head * d;
        load_rows<D, THREADS>(tile_of(step).douts, from, query_columns, n <= 32 ? 32 : TILE, n, sizes);
    };
    auto load_queries = [&](int step) {
        if (step >= steps) return;
        int head = kv_head * group + step / per_head, query = query_of(step), n = count_of(query);
        QueryTile tile = tile_of(step);
        const float* from = qkv + (sequence + query) * columns + (size_t)head * d;
        load_rows<D, THREADS>(tile.queries, from, columns, n <= 32 ? 32 : TILE, n, sizes);
        int i = threadIdx.x % TILE, which = threadIdx.x / TILE;
        if (which < 2) {
            const float* statistics = (which == 0 ? lse : delta) + (sequence + query) * sizes.n_heads + head;
            copy_async_4(tile.statistics + which * TILE + i, statistics + (i < n ? (size_t)i * sizes.n_heads : 0),
                         i < n);
        }
    };
    load_rows<D, THREADS>(values, own_rows + value_column, columns, ROWS, count, sizes);
    load_douts(0);
    copy_async_commit();
    load_rows<D, THREADS>(keys, own_rows + key_column, columns, ROWS, count, sizes);
    load_queries(0);
    copy_async_commit();

    const int warp_row = at.warp * 4 * RM, row = warp_row + at.group;
    float dk[RM][4 * pieces<D>()], dv[RM][4 * pieces<D>()];
#pragma unroll
    for (int r = 0; r < RM; r++)
#pragma unroll
        for (int c = 0; c < 4 * pieces<D>(); c++) dk[r][c] = dv[r][c] = 0.0f;
    const Own own = {keys + row * stride, values + row * stride, squares + row * SQUARE + at.column,
                     squares + (ROWS + row) * SQUARE + at.column};
    for (int step = 0; step < steps; step++) {
        const int query = query_of(step), n = count_of(query);
        const QueryTile tile = tile_of(step);
        // The lane's first row meets the tile's queries from `begin` on, which grows by 4 from row to row.
        const int begin = first + row - query, warp_begin = first + warp_row - query;
        const bool meet = warp_begin < n;
        copy_async_wait<1>();
        __syncthreads();
        float dp[RM][8];
        const float* const douts = tile.douts + at.column * row_floats(d);
        if (meet && n > 32)
            dots<D, RM, 8>(dp, own.value, douts, d);
        else if (meet)
            dots<D, RM, 4>(dp, own.value, douts, d);
        // The queries have arrived: one barrier for all warps, whatever each has computed.
        copy_async_wait<0>();
        __syncthreads();
        if (meet && n > 32)
            score_grads<D, RM, 8>(own, tile, dp, at, scale, d);
        else if (meet)
            score_grads<D, RM, 4>(own, tile, dp, at, scale, d);
        __syncwarp(0xffffffffu);
        if (TILES > 1) {
            load_douts(step + 1);
            copy_async_commit();
            load_queries(step + 1);
            copy_async_commit();
        }
        const int end = floor4(n + 3), all_begin = floor4(clamp_tile(warp_begin + 4 * RM - 1) + 3);
        const Span span = {floor4(clamp_tile(warp_begin)), all_begin, floor4(n), end};
        auto meets = [&](int r, int j) { return j >= begin + 4 * r && j < n; };
        if (meet)
            chains<D, RM>(dv, own.p - at.column, tile.douts + 4 * at.column, span, d, meets, [](int, bool) {});
        if (TILES == 1 && step + 1 < steps) {
            __syncthreads();
            load_douts(step + 1);
            copy_async_commit();
        }
        if (meet)
            chains<D, RM>(dk, own.ds - at.column, tile.queries + 4 * at.column, span, d, meets, [](int, bool) {});
        if (TILES == 1 && step + 1 < steps) {
            __syncthreads();
            load_queries(step + 1);
            copy_async_commit();
        }
    }

#pragma unroll
    for (int r = 0; r < RM; r++) {
        int j = first + row + 4 * r;
        if (j < seq_len) {
            float* to = dqkv + (sequence + j) * columns;
            store_row<D>(to + key_column, dk[r], scale, at.column, d);
            store_row<D>(to + value_column, dv[r], 1.0f, at.column, d);
        }
    }
}

#define ENTRY(NAME, D, RM, WARPS, TILES, BLOCKS)                                                                   \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)                                               \
        NAME(const float* qkv, const float* dout, const float* lse, const float* delta, float* dqkv,               \
             unsigned seq_len, unsigned n_heads, unsigned n_kv_heads, unsigned head_dim, float scale,              \
             unsigned wide) {                                                                                      \
        Sizes<D> sizes = {(int)seq_len, (int)n_heads, (int)n_kv_heads, (int)head_dim, wide != 0};                  \
        grad_key_value<D, RM, WARPS, TILES>(qkv, dout, lse, delta, dqkv, sizes, scale);                            \
    }

// Many rows a lane, so that shared memory keeps up with the multiply-adds.
ENTRY(attention_grad_key_value_f32_d32, 32, 4, 4, 1, 3)
ENTRY(attention_grad_key_value_f32_d64, 64, 4, 4, 1, 2)
ENTRY(attention_grad_key_value_f32_d128, 128, 2, 8, 1, 1)
// One row a lane, so that a small call has blocks for every multiprocessor.
ENTRY(attention_grad_key_value_f32_d32_small, 32, 1, 4, 2, 3)
ENTRY(attention_grad_key_value_f32_d64_small, 64, 1, 4, 2, 2)
ENTRY(attention_grad_key_value_f32_d128_small, 128, 1, 4, 2, 1)
ENTRY(attention_grad_key_value_f32_any, 0, 1, 4, 1, 1)
