// Causal attention, the forward pass: src/op/attention.rs, `Attention`.
//
// A block owns queries of one head and walks over the tiles of keys. Loads of the next keys run under the
// softmax and the output's chains, loads of the values under the scores.
#include "attention.cuh"

using namespace attention;

// `e^x` for x at most zero or a NaN: contract::exp without what only greater numbers need.
__device__ __forceinline__ float exp_up_to_zero(float x) {
    contract::Reduced e = contract::reduce_exp(fmaxf(x, -104.0f));
    float p = __fadd_rn(1.0f, __fadd_rn(e.r, e.tail));
    float y = contract::scale_exp(p, e.n_bits, true);
    return x != x ? contract::from_bits(contract::NAN_BITS) : y;
}

// The greatest of the lanes that share a group of rows.
__device__ __forceinline__ float group_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 4));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 8));
}

// What a lane carries from tile to tile: the output's chains and the maximum of its rows, and the sum of
// its own row, the one of its rows that its column selects.
template <int D, int RM>
struct Carried {
    float acc[RM][4 * pieces<D>()];
    float max[RM];
    float sum;
};

// A tile's place: `visible` is the number of its keys that the lane's first row sees, which grows by 4
// from row to row and may be outside of the tile; the others are those of the warp's first and last row.
struct KeyTile {
    const float* query;
    const float* key;
    const float* value;
    float* square;
    int visible, visible_first, visible_last;
};

template <int D, int RM, int CN>
__device__ __forceinline__ void scores(Carried<D, RM>& carried, const KeyTile& tile, const Place& at, float scale,
                                       int d) {
    float s[RM][8];
    dots<D, RM, CN>(s, tile.query, tile.key, d);
    const bool hidden = tile.visible_first < 8 * CN;
    float own_factor = 1.0f;
#pragma unroll
    for (int r = 0; r < RM; r++) {
        float top = carried.max[r];
#pragma unroll
        for (int i = 0; i < CN; i++) s[r][i] = __fmul_rn(s[r][i], scale);
        if (hidden) {
#pragma unroll
            for (int i = 0; i < CN; i++)
                if (at.column + 8 * i < tile.visible + 4 * r) top = fmaxf(top, s[r][i]);
        } else {
#pragma unroll
            for (int i = 0; i < CN; i++) top = fmaxf(top, s[r][i]);
        }
        top = group_max(top);
        float factor = exp_up_to_zero(__fsub_rn(carried.max[r], top));
        carried.max[r] = top;
        if (at.column % RM == r) own_factor = factor;
#pragma unroll
        for (int i = 0; i < CN; i++)
            tile.square[4 * r * SQUARE + 8 * i] = exp_up_to_zero(__fsub_rn(s[r][i], top));
#pragma unroll
        for (int c = 0; c < 4 * pieces<D>(); c++) carried.acc[r][c] = __fmul_rn(carried.acc[r][c], factor);
    }
    carried.sum = __fmul_rn(carried.sum, own_factor);
}

template <int D, int RM>
__device__ __forceinline__ void outputs(Carried<D, RM>& carried, const KeyTile& tile, const Place& at, int d) {
    const int own = at.column % RM;
    const float* own_row = tile.square - at.column + 4 * own * SQUARE;
    const int own_visible = tile.visible + 4 * own;
    const int all = floor4(clamp_tile(tile.visible_first));
    Span span = {0, 0, all, floor4(clamp_tile(tile.visible_last) + 3)};
    chains<D, RM>(
        carried.acc, tile.square - at.column, tile.value, span, d,
        [&](int r, int j) { return j < tile.visible + 4 * r; },
        [&](int j, bool whole) {
            float4 p = read4(own_row + j);
            if (whole || j < own_visible) carried.sum = __fadd_rn(carried.sum, p.x);
            if (whole || j + 1 < own_visible) carried.sum = __fadd_rn(carried.sum, p.y);
            if (whole || j + 2 < own_visible) carried.sum = __fadd_rn(carried.sum, p.z);
            if (whole || j + 3 < own_visible) carried.sum = __fadd_rn(carried.sum, p.w);
        });
}

// Grid: (batch · heads, blocks of queries, the last ones first). Shared memory: queries, keys, values and
// the square.
template <int D, int RM, int WARPS>
__device__ __forceinline__ void forward(const float* qkv, float* o, float* lse, const Sizes<D>& sizes, float scale) {
    constexpr int ROWS = 4 * RM * WARPS, THREADS = 32 * WARPS;
    extern __shared__ __align__(16) float shared[];
    const int d = sizes.dim(), stride = sizes.stride(), seq_len = sizes.seq_len;
    float* const queries = shared;
    float* const keys = queries + ROWS * stride;
    float* const values = keys + TILE * stride;
    float* const square = values + TILE * stride;

    const Place at = place();
    const int head = blockIdx.x % sizes.n_heads;
    const size_t sequence = (size_t)(blockIdx.x / sizes.n_heads) * seq_len;
    const int first = (int)(gridDim.y - 1 - blockIdx.y) * ROWS;
    const int end = first + ROWS < seq_len ? first + ROWS : seq_len;
    const int kv_head = head / (sizes.n_heads / sizes.n_kv_heads);
    const size_t columns = sizes.columns();
    const float* const q_from = qkv + (sequence + first) * columns + (size_t)head * d;
    const float* const k_from = qkv + sequence * columns + (size_t)(sizes.n_heads + kv_head) * d;
    const float* const v_from = k_from + (size_t)sizes.n_kv_heads * d;

    auto load_tile = [&](float* to, const float* from, int tile) {
        if (tile < end) {
            int count = end - tile < TILE ? end - tile : TILE;
            load_rows<D, THREADS>(to, from + tile * columns, columns, count <= 32 ? 32 : TILE, count, sizes);
        }
        copy_async_commit();
    };
    load_rows<D, THREADS>(queries, q_from, columns, ROWS, end - first, sizes);
    load_tile(keys, k_from, 0);
    load_tile(values, v_from, 0);

    const int warp_row = at.warp * 4 * RM, row = warp_row + at.group;
    Carried<D, RM> carried;
#pragma unroll
    for (int r = 0; r < RM; r++) {
        carried.max[r] = contract::from_bits(0xff800000u);
#pragma unroll
        for (int c = 0; c < 4 * pieces<D>(); c++) carried.acc[r][c] = 0.0f;
    }
    carried.sum = 0.0f;
    KeyTile tile = {queries + row * stride, keys + at.column * stride, values + 4 * at.column,
                    square + row * SQUARE + at.column, 0, 0, 0};
    for (int key = 0; key < end; key += TILE) {
        tile.visible = first + row - key + 1;
        tile.visible_first = first + warp_row - key + 1;
        tile.visible_last = tile.visible_first + 4 * RM - 1;
        // Rows behind the sequence's end are zeros and see no key behind it.
        if (tile.visible_last > end - key) tile.visible_last = end - key;
        if (first + warp_row >= end) tile.visible_last = 0;
        if (key == 0)
            copy_async_wait<1>();
        else
            copy_async_wait<0>();
        __syncthreads();
        if (key > 0) load_tile(values, v_from, key);
        if (tile.visible_last > 32)
            scores<D, RM, 8>(carried, tile, at, scale, d);
        else if (tile.visible_last > 0)
            scores<D, RM, 4>(carried, tile, at, scale, d);
        copy_async_wait<0>();
        __syncthreads();
        load_tile(keys, k_from, key + TILE);
        if (tile.visible_last > 0) outputs<D, RM>(carried, tile, at, d);
    }

#pragma unroll
    for (int r = 0; r < RM; r++) {
        float sum = __shfl_sync(0xffffffffu, carried.sum, lane_at(r, at.group));
        int i = first + row + 4 * r;
        if (i < seq_len) {
            size_t token = sequence + i;
            store_row<D>(o + token * sizes.query_columns() + (size_t)head * d, carried.acc[r], __fdiv_rn(1.0f, sum),
                         at.column, d);
            if (at.column == r)
                lse[token * sizes.n_heads + head] = __fadd_rn(carried.max[r], contract::log(sum));
        }
    }
}

#define ENTRY(NAME, D, RM, WARPS, BLOCKS)                                                                          \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)                                               \
        NAME(const float* qkv, float* o, float* lse, unsigned seq_len, unsigned n_heads, unsigned n_kv_heads,      \
             unsigned head_dim, float scale, unsigned wide) {                                                      \
        Sizes<D> sizes = {(int)seq_len, (int)n_heads, (int)n_kv_heads, (int)head_dim, wide != 0};                  \
        forward<D, RM, WARPS>(qkv, o, lse, sizes, scale);                                                          \
    }

// Many rows a lane, so that shared memory keeps up with the multiply-adds.
ENTRY(attention_f32_d32, 32, 8, 4, 3)
ENTRY(attention_f32_d64, 64, 8, 4, 2)
ENTRY(attention_f32_d128, 128, 4, 8, 1)
// Few rows a lane, so that a small call has blocks for every multiprocessor.
ENTRY(attention_f32_d32_small, 32, 2, 4, 3)
ENTRY(attention_f32_d64_small, 64, 2, 4, 3)
ENTRY(attention_f32_d128_small, 128, 2, 4, 2)
ENTRY(attention_f32_any, 0, 2, 4, 1)
