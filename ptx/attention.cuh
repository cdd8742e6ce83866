// What the attention kernels share: a block's own rows meet tiles of other rows.
//
// A block owns ROWS = 4 · RM · WARPS rows (queries, or keys in the key and value pass) and walks over
// tiles of 64 others. A warp owns 4 · RM consecutive rows alone, so the square of one value a pair passes
// between its lanes without a block barrier. A lane holds RM rows, 4 apart, and 8 columns of others, 8
// apart; in the chains it holds the same rows and groups of 4 head columns, 32 apart. Every chain runs in
// one lane, ascending; pairs that the mask forbids may be computed, but no chain takes them.
#ifndef BITSTEP_ATTENTION_CUH
#define BITSTEP_ATTENTION_CUH

#include "async.cuh"
#include "contract.cuh"

namespace attention {

// Keys of a softmax tile, and others of any tile.
constexpr int TILE = 64;
// Floats from one row of a square to the next: the 4 rows that a warp stores at once meet 32 banks.
constexpr int SQUARE = TILE + 8;

// A lane's place. The columns take bits 0, 2 and 3 of the lane and the rows bits 1 and 4, so that for
// rows and for columns every lane has a neighbour with the same address: then a 16-byte read of shared
// memory takes two passes instead of four.
struct Place {
    int warp, column, group;
};

__device__ __forceinline__ Place place() {
    int lane = threadIdx.x & 31;
    return {(int)(threadIdx.x >> 5), (lane & 1) | ((lane >> 1) & 6), ((lane >> 1) & 1) | ((lane >> 3) & 2)};
}

// The lane of a warp at `column` in the caller's group.
__device__ __forceinline__ int lane_at(int column, int group) {
    return (column & 1) | ((column & 6) << 1) | ((group & 1) << 1) | ((group & 2) << 3);
}

// Groups of 32 head columns; D is 0 where the head's size comes with the call.
template <int D>
__host__ __device__ constexpr int pieces() {
    return (D ? D : 256) / 32;
}

// Floats from one row of a head in shared memory to the next: an odd number of 16-byte words, so that
// 8 consecutive rows meet all banks.
__device__ __forceinline__ int row_floats(int d) {
    return 4 * (((d + 3) / 4) | 1);
}

// The sizes of a call, with the head's size known to the compiler if D is not 0.
template <int D>
struct Sizes {
    int seq_len, n_heads, n_kv_heads, runtime_dim;
    // Whether every row of a head begins at a multiple of 16 bytes.
    bool wide;

    __device__ __forceinline__ int dim() const { return D ? D : runtime_dim; }
    __device__ __forceinline__ int stride() const { return row_floats(dim()); }
    __device__ __forceinline__ size_t columns() const {
        return (size_t)(n_heads + 2 * n_kv_heads) * dim();
    }
    __device__ __forceinline__ size_t query_columns() const { return (size_t)n_heads * dim(); }
};

// Starts copying rows of a head to shared memory: the first `count` of `rows`, then zeros.
template <int D, int THREADS>
__device__ __forceinline__ void load_rows(float* to, const float* from, size_t from_stride, int rows, int count,
                                          const Sizes<D>& sizes) {
    if constexpr (D != 0) {
        constexpr int WORDS = D / 4, STEP = THREADS / WORDS;
        static_assert(THREADS % WORDS == 0, "a thread keeps its column");
        int row = threadIdx.x / WORDS, word = threadIdx.x % WORDS;
        from += row * from_stride + 4 * word;
        to += row * sizes.stride() + 4 * word;
#pragma unroll 4
        for (; row < rows; row += STEP) {
            copy_async_16(to, from, row < count);
            from += STEP * from_stride;
            to += STEP * sizes.stride();
        }
    } else {
        int d = sizes.dim();
        for (int row = threadIdx.x >> 5; row < rows; row += THREADS / 32) {
            bool present = row < count;
            const float* source = from + (present ? row * from_stride : 0);
            float* target = to + row * sizes.stride();
            if (sizes.wide) {
                for (int i = 4 * (threadIdx.x & 31); i < d; i += 128)
                    copy_async_16(target + i, source + (present ? i : 0), present);
            } else {
                for (int i = threadIdx.x & 31; i < d; i += 32)
                    copy_async_4(target + i, source + (present ? i : 0), present);
            }
        }
    }
}

__device__ __forceinline__ float4 read4(const float* from) {
    return *reinterpret_cast<const float4*>(from);
}

// s[r][i] = Σ own[4r] · other[8i], one fma chain over ascending head columns. `own` and `other` are the
// lane's first rows.
template <int D, int RM, int CN>
__device__ __forceinline__ void dots(float (&s)[RM][8], const float* own, const float* other, int d) {
    const int stride = row_floats(D ? D : d);
#pragma unroll
    for (int r = 0; r < RM; r++)
#pragma unroll
        for (int i = 0; i < CN; i++) s[r][i] = 0.0f;
    constexpr int UNROLL = RM * CN >= 64 || (D == 32 && RM * CN >= 32) ? 1 : RM * CN >= 32 ? 2 : 4;
    const int whole = (D ? D : d) / 4;
#pragma unroll UNROLL
    for (int c = 0; c < whole; c++) {
        float4 b[CN];
#pragma unroll
        for (int i = 0; i < CN; i++) b[i] = read4(other + 8 * i * stride + 4 * c);
#pragma unroll
        for (int r = 0; r < RM; r++) {
            float4 a = read4(own + 4 * r * stride + 4 * c);
#pragma unroll
            for (int i = 0; i < CN; i++) s[r][i] = __fmaf_rn(a.x, b[i].x, s[r][i]);
#pragma unroll
            for (int i = 0; i < CN; i++) s[r][i] = __fmaf_rn(a.y, b[i].y, s[r][i]);
#pragma unroll
            for (int i = 0; i < CN; i++) s[r][i] = __fmaf_rn(a.z, b[i].z, s[r][i]);
#pragma unroll
            for (int i = 0; i < CN; i++) s[r][i] = __fmaf_rn(a.w, b[i].w, s[r][i]);
        }
    }
    if constexpr (D == 0) {
        for (int c = 4 * whole; c < d; c++) {
#pragma unroll
            for (int r = 0; r < RM; r++) {
                float a = own[4 * r * stride + c];
#pragma unroll
                for (int i = 0; i < CN; i++) s[r][i] = __fmaf_rn(a, other[8 * i * stride + c], s[r][i]);
            }
        }
    }
}

// Which others of a tile a warp's rows meet: some rows those of begin..end, all rows those of
// all_begin..all_end; all are multiples of 4.
struct Span {
    int begin, all_begin, all_end, end;
};

__device__ __forceinline__ int floor4(int x) { return x & ~3; }
__device__ __forceinline__ int clamp_tile(int x) { return x < 0 ? 0 : x > TILE ? TILE : x; }

// acc[r][c] = fma(weights[4r][j], columns[j][c], acc[r][c]) for ascending j of the tile that `meets(r, j)`.
// `also(j, whole)` runs once for every 4 others from j on, `whole` if all rows meet all of them.
template <int D, int RM, class Meets, class Also>
__device__ __forceinline__ void chains(float (&acc)[RM][4 * pieces<D>()], const float* weights, const float* columns,
                                       Span span, int d, Meets meets, Also also) {
    constexpr int P = pieces<D>();
    const int stride = row_floats(D ? D : d);
    int j = span.begin;
    while (j < span.end) {
        if (j >= span.all_begin && j < span.all_end) {
            constexpr int UNROLL = RM * P >= 16 ? 1 : 2;
#pragma unroll UNROLL
            for (; j < span.all_end; j += 4) {
                float4 w[RM];
#pragma unroll
                for (int r = 0; r < RM; r++) w[r] = read4(weights + 4 * r * SQUARE + j);
                also(j, true);
#pragma unroll
                for (int k = 0; k < 4; k++) {
#pragma unroll
                    for (int i = 0; i < P; i++) {
                        if (D == 0 && 32 * i >= d) continue;
                        float4 v = read4(columns + (j + k) * stride + 32 * i);
#pragma unroll
                        for (int r = 0; r < RM; r++) {
                            float p = k == 0 ? w[r].x : k == 1 ? w[r].y : k == 2 ? w[r].z : w[r].w;
                            acc[r][4 * i] = __fmaf_rn(p, v.x, acc[r][4 * i]);
                            acc[r][4 * i + 1] = __fmaf_rn(p, v.y, acc[r][4 * i + 1]);
                            acc[r][4 * i + 2] = __fmaf_rn(p, v.z, acc[r][4 * i + 2]);
                            acc[r][4 * i + 3] = __fmaf_rn(p, v.w, acc[r][4 * i + 3]);
                        }
                    }
                }
            }
        } else {
            also(j, false);
#pragma unroll 1
            for (int k = 0; k < 4; k++) {
#pragma unroll
                for (int r = 0; r < RM; r++) {
                    if (!meets(r, j + k)) continue;
                    float p = weights[4 * r * SQUARE + j + k];
#pragma unroll
                    for (int i = 0; i < P; i++) {
                        if (D == 0 && 32 * i >= d) continue;
                        float4 v = read4(columns + (j + k) * stride + 32 * i);
                        acc[r][4 * i] = __fmaf_rn(p, v.x, acc[r][4 * i]);
                        acc[r][4 * i + 1] = __fmaf_rn(p, v.y, acc[r][4 * i + 1]);
                        acc[r][4 * i + 2] = __fmaf_rn(p, v.z, acc[r][4 * i + 2]);
                        acc[r][4 * i + 3] = __fmaf_rn(p, v.w, acc[r][4 * i + 3]);
                    }
                }
            }
            j += 4;
        }
    }
}

// Writes one row of finished sums times a factor: `to` is the head's first column.
template <int D>
__device__ __forceinline__ void store_row(float* to, const float (&sums)[4 * pieces<D>()], float factor, int column,
                                          int d) {
#pragma unroll
    for (int i = 0; i < pieces<D>(); i++) {
        int c = 32 * i + 4 * column;
        if constexpr (D != 0) {
            *reinterpret_cast<float4*>(to + c) =
                make_float4(__fmul_rn(sums[4 * i], factor), __fmul_rn(sums[4 * i + 1], factor),
                            __fmul_rn(sums[4 * i + 2], factor), __fmul_rn(sums[4 * i + 3], factor));
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (c + e < d) to[c + e] = __fmul_rn(sums[4 * i + e], factor);
        }
    }
}

}  // namespace attention

#endif
