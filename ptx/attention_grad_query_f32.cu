// The query columns of attention's gradient: src/op/attention.rs, `AttentionGradQuery`.
//
// A block owns queries of one head and their output gradients and walks over the tiles of keys. Loads of
// the next values run under the chains of `dq`, loads of the next keys under the products with values.
#include "attention.cuh"

using namespace attention;

// A tile's place: `visible` is the number of its keys that the lane's first row sees, which grows by 4
// from row to row and may be outside of the tile; the others are those of the warp's first and last row.
struct KeyTile {
    const float* query;
    const float* dout;
    const float* key;
    const float* value;
    float* square;
    int visible, visible_first, visible_last;
};

// `ds` of a tile to the square, from the products `dp` of output gradients and values.
template <int D, int RM, int CN>
__device__ __forceinline__ void score_grads(const KeyTile& tile, const float (&dp)[RM][8], const float (&lse)[RM],
                                            const float (&delta)[RM], float scale, int d) {
    float s[RM][8];
    dots<D, RM, CN>(s, tile.query, tile.key, d);
#pragma unroll
    for (int r = 0; r < RM; r++)
#pragma unroll
        for (int i = 0; i < CN; i++) {
            float p = contract::exp(__fsub_rn(__fmul_rn(s[r][i], scale), lse[r]));
            tile.square[4 * r * SQUARE + 8 * i] = __fmul_rn(p, __fsub_rn(dp[r][i], delta[r]));
        }
}

// Grid: (batch · heads, blocks of queries, the last ones first). Shared memory: queries, output
// gradients, keys, values and the square.
template <int D, int RM, int WARPS>
__device__ __forceinline__ void grad_query(const float* qkv, const float* dout, const float* lse, const float* delta,
                                           float* dqkv, const Sizes<D>& sizes, float scale) {
    constexpr int ROWS = 4 * RM * WARPS, THREADS = 32 * WARPS;
    extern __shared__ __align__(16) float shared[];
    const int d = sizes.dim(), stride = sizes.stride(), seq_len = sizes.seq_len;
    float* const queries = shared;
    float* const douts = queries + ROWS * stride;
    float* const keys = douts + ROWS * stride;
    float* const values = keys + TILE * stride;
    float* const square = values + TILE * stride;

    const Place at = place();
    const int head = blockIdx.x % sizes.n_heads;
    const size_t sequence = (size_t)(blockIdx.x / sizes.n_heads) * seq_len;
    const int first = (int)(gridDim.y - 1 - blockIdx.y) * ROWS;
    const int end = first + ROWS < seq_len ? first + ROWS : seq_len;
    const int kv_head = head / (sizes.n_heads / sizes.n_kv_heads);
    const size_t columns = sizes.columns(), query_columns = sizes.query_columns();
    const float* const q_from = qkv + (sequence + first) * columns + (size_t)head * d;
    const float* const dout_from = dout + (sequence + first) * query_columns + (size_t)head * d;
    const float* const k_from = qkv + sequence * columns + (size_t)(sizes.n_heads + kv_head) * d;
    const float* const v_from = k_from + (size_t)sizes.n_kv_heads * d;

    auto load_tile = [&](float* to, const float* from, int tile) {
        if (tile < end) {
            int count = end - tile < TILE ? end - tile : TILE;
            load_rows<D, THREADS>(to, from + tile * columns, columns, count <= 32 ? 32 : TILE, count, sizes);
        }
        copy_async_commit();
    };
    load_rows<D, THREADS>(douts, dout_from, query_columns, ROWS, end - first, sizes);
    load_tile(values, v_from, 0);
    load_rows<D, THREADS>(queries, q_from, columns, ROWS, end - first, sizes);
    load_tile(keys, k_from, 0);

    const int warp_row = at.warp * 4 * RM, row = warp_row + at.group;
    float acc[RM][4 * pieces<D>()], row_lse[RM], row_delta[RM];
#pragma unroll
    for (int r = 0; r < RM; r++) {
        int i = first + row + 4 * r;
        size_t statistic = (sequence + i) * sizes.n_heads + head;
        row_lse[r] = i < seq_len ? lse[statistic] : 0.0f;
        row_delta[r] = i < seq_len ? delta[statistic] : 0.0f;
#pragma unroll
        for (int c = 0; c < 4 * pieces<D>(); c++) acc[r][c] = 0.0f;
    }
    KeyTile tile = {queries + row * stride, douts + row * stride,       keys + at.column * stride,
                    values + at.column * stride, square + row * SQUARE + at.column, 0, 0, 0};
    for (int key = 0; key < end; key += TILE) {
        tile.visible = first + row - key + 1;
        tile.visible_first = first + warp_row - key + 1;
        tile.visible_last = tile.visible_first + 4 * RM - 1;
        // Rows behind the sequence's end are zeros and see no key behind it.
        if (tile.visible_last > end - key) tile.visible_last = end - key;
        if (first + warp_row >= end) tile.visible_last = 0;
        copy_async_wait<1>();
        __syncthreads();
        float dp[RM][8];
        if (tile.visible_last > 32)
            dots<D, RM, 8>(dp, tile.dout, tile.value, d);
        else if (tile.visible_last > 0)
            dots<D, RM, 4>(dp, tile.dout, tile.value, d);
        // The keys have arrived: one barrier for all warps, whatever each has computed.
        copy_async_wait<0>();
        __syncthreads();
        if (tile.visible_last > 32)
            score_grads<D, RM, 8>(tile, dp, row_lse, row_delta, scale, d);
        else if (tile.visible_last > 0)
            score_grads<D, RM, 4>(tile, dp, row_lse, row_delta, scale, d);
        __syncthreads();
        load_tile(values, v_from, key + TILE);
        if (tile.visible_last > 0) {
            Span span = {0, 0, floor4(clamp_tile(tile.visible_first)), floor4(clamp_tile(tile.visible_last) + 3)};
            chains<D, RM>(
                acc, tile.square - at.column, keys + 4 * at.column, span, d,
                [&](int r, int j) { return j < tile.visible + 4 * r; }, [](int, bool) {});
        }
        if (key + TILE < end) {
            __syncthreads();
            load_tile(keys, k_from, key + TILE);
        }
    }

#pragma unroll
    for (int r = 0; r < RM; r++) {
        int i = first + row + 4 * r;
        if (i < seq_len) store_row<D>(dqkv + (sequence + i) * columns + (size_t)head * d, acc[r], scale, at.column, d);
    }
}

#define ENTRY(NAME, D, RM, WARPS, BLOCKS)                                                                          \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)                                               \
        NAME(const float* qkv, const float* dout, const float* lse, const float* delta, float* dqkv,               \
             unsigned seq_len, unsigned n_heads, unsigned n_kv_heads, unsigned head_dim, float scale,              \
             unsigned wide) {                                                                                      \
        Sizes<D> sizes = {(int)seq_len, (int)n_heads, (int)n_kv_heads, (int)head_dim, wide != 0};                  \
        grad_query<D, RM, WARPS>(qkv, dout, lse, delta, dqkv, sizes, scale);                                       \
    }

// Many rows a lane, so that shared memory keeps up with the multiply-adds.
ENTRY(attention_grad_query_f32_d32, 32, 4, 4, 3)
ENTRY(attention_grad_query_f32_d64, 64, 4, 4, 2)
ENTRY(attention_grad_query_f32_d128, 128, 4, 6, 1)
// Few rows a lane, so that a small call has blocks for every multiprocessor.
ENTRY(attention_grad_query_f32_d32_small, 32, 2, 4, 3)
ENTRY(attention_grad_query_f32_d64_small, 64, 2, 4, 3)
ENTRY(attention_grad_query_f32_d128_small, 128, 2, 4, 1)
ENTRY(attention_grad_query_f32_any, 0, 2, 4, 1)
