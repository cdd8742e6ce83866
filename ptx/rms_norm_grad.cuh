// With x = r * rstd, g = dh * weight and c = (sum g * x) / d: dr (+)= rstd * fma(-x, c, g), a warp a row, and
// dweight = the token sum of dh * x. The residual stream and its gradient are stored in f32, dh and the copy of
// dr, which is the gradient of what the norm has added, in H: f32, bf16 or f16.
//
// Where the weight has a gradient a block serves a piece, as rms_norm_grad_relay.cuh says, and leaves a row of partial
// sums; rms_norm_grad_folds_f32.cu folds those. Rows that do not fit in shared memory are read from memory, for the
// chains a second time.
//
// Where dh and r are small enough to be read twice from the L2 cache, some blocks serve rows, the others the chains.
#pragma once
#include "contract.cuh"
#include "storage.cuh"

namespace norm_grad {

using contract::TokenCut;
using storage::load4;
using storage::store4;

/// Bits of Params::flags: dr is added to; its copy is written.
constexpr unsigned ADD = 1, COPY = 2;

template <typename H>
struct Params {
    const H* dh;
    const float* r;
    const float* weight;
    const float* rstd;
    float* dr;
    H* ddelta;
    TokenCut cut;
    unsigned d;
    unsigned flags;
    /// A row for each piece.
    float* partials;

    __device__ __forceinline__ bool adds() const { return (flags & ADD) != 0; }
    __device__ __forceinline__ bool copies() const { return (flags & COPY) != 0; }
};

__device__ __forceinline__ float input_gradient(float g, float x, float rstd, float c) {
    return __fmul_rn(rstd, __fmaf_rn(contract::negate(x), c, g));
}
__device__ __forceinline__ float4 input_gradient(float4 g, float4 x, float rstd, float c) {
    return make_float4(input_gradient(g.x, x.x, rstd, c), input_gradient(g.y, x.y, rstd, c),
                       input_gradient(g.z, x.z, rstd, c), input_gradient(g.w, x.w, rstd, c));
}
__device__ __forceinline__ float4 times(float4 a, float4 b) {
    return make_float4(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w));
}
__device__ __forceinline__ float4 times(float4 a, float b) { return times(a, make_float4(b, b, b, b)); }
__device__ __forceinline__ float4 plus(float4 a, float4 b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}
/// acc[0 .. 4] = fma(a, b, acc).
__device__ __forceinline__ void chain_step(float4 a, float4 b, float* acc) {
    acc[0] = __fmaf_rn(a.x, b.x, acc[0]);
    acc[1] = __fmaf_rn(a.y, b.y, acc[1]);
    acc[2] = __fmaf_rn(a.z, b.z, acc[2]);
    acc[3] = __fmaf_rn(a.w, b.w, acc[3]);
}

/// Where a row's operands lie: in memory, or in shared memory.
template <typename H>
struct Row {
    const H* dh;
    const float* r;
    /// What is added to.
    const float* old;
};

/// The input gradient of row t by one warp.
template <bool QUADS, typename H>
__device__ __forceinline__ void row_gradient(const Params<H>& p, unsigned t, const Row<H>& row) {
    float* dr = p.dr + (size_t)t * p.d;
    H* copy = p.ddelta + (size_t)t * p.d;
    const float rstd = p.rstd[t];
    float lanes[8] = {};
    if constexpr (QUADS) {
        contract::for_quads(p.d, [&](unsigned i, int lane) {
            chain_step(times(load4(row.dh + i), load4(p.weight + i)), times(load4(row.r + i), rstd), lanes + lane);
        });
        const float c = __fdiv_rn(contract::fold_quads(lanes), __uint2float_rn(p.d));
        contract::for_quads(p.d, [&](unsigned i, int) {
            const float4 g = times(load4(row.dh + i), load4(p.weight + i));
            float4 y = input_gradient(g, times(load4(row.r + i), rstd), rstd, c);
            if (p.adds()) y = plus(load4(row.old + i), y);
            store4(dr + i, y);
            if (p.copies()) store4(copy + i, y);
        });
    } else {
        contract::for_strided(p.d, [&](unsigned i, int lane) {
            const float g = __fmul_rn(storage::widen(row.dh[i]), p.weight[i]);
            lanes[lane] = __fmaf_rn(g, __fmul_rn(row.r[i], rstd), lanes[lane]);
        });
        const float c = __fdiv_rn(contract::fold_strided(lanes), __uint2float_rn(p.d));
        contract::for_strided(p.d, [&](unsigned i, int) {
            const float g = __fmul_rn(storage::widen(row.dh[i]), p.weight[i]);
            float y = input_gradient(g, __fmul_rn(row.r[i], rstd), rstd, c);
            if (p.adds()) y = __fadd_rn(row.old[i], y);
            dr[i] = y;
            if (p.copies()) copy[i] = storage::narrowed<H>(y);
        });
    }
}

/// The same with the row's operands in memory.
template <bool QUADS, typename H>
__device__ __forceinline__ void row_from_memory(const Params<H>& p, unsigned t) {
    const size_t start = (size_t)t * p.d;
    row_gradient<QUADS>(p, t, Row<H>{p.dh + start, p.r + start, p.dr + start});
}

/// Without a weight gradient: a warp a row.
template <bool QUADS, typename H>
__device__ __forceinline__ void rows_alone(const Params<H>& p) {
    const unsigned t = blockIdx.x * 4 + threadIdx.x / 32;
    if (t < p.cut.tokens) row_from_memory<QUADS>(p, t);
}

/// The tokens of a block: one piece.
struct Piece {
    unsigned grain, piece, first, end;

    __device__ __forceinline__ explicit Piece(const TokenCut& cut)
        : grain(blockIdx.x / cut.pieces_per_grain()), piece(blockIdx.x % cut.pieces_per_grain()),
          first(cut.first(grain, piece)), end(cut.end(grain, piece)) {}
    /// Grids have a block for every piece of whole grains; the last grain may have fewer.
    __device__ __forceinline__ bool exists(const TokenCut& cut) const { return piece < cut.pieces(grain); }
};

/// Rows that are read from memory, for the chains once more.
template <bool QUADS, typename H>
__device__ __forceinline__ void piece_from_memory(const Params<H>& p) {
    const unsigned warps = blockDim.x / 32;
    const Piece at(p.cut);
    if (!at.exists(p.cut)) return;
    float* partial = p.partials + (size_t)blockIdx.x * p.d;
    for (unsigned t = at.first + threadIdx.x / 32; t < at.end; t += warps) row_from_memory<QUADS>(p, t);
    for (unsigned j = threadIdx.x; j < p.d; j += blockDim.x) {
        float acc = 0.0f;
#pragma unroll 8
        for (unsigned t = at.first; t < at.end; ++t) {
            const size_t i = (size_t)t * p.d + j;
            acc = __fmaf_rn(storage::widen(p.dh[i]), __fmul_rn(p.r[i], p.rstd[t]), acc);
        }
        partial[j] = acc;
    }
}

/// The longest row of which a thread holds its part in registers: two quads.
__device__ constexpr unsigned SHORT_ROW = 256;

/// The input gradient of a short row by one warp, all its loads under way together.
template <typename H>
__device__ __forceinline__ void short_row_gradient(const Params<H>& p, unsigned t) {
    const size_t start = (size_t)t * p.d;
    float4 g[2], x[2], w[2], old[2];
    const float rstd = p.rstd[t];
    float lanes[8] = {};
    auto each = [&](auto step) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const unsigned i = 4 * (threadIdx.x & 31u) + 128 * k;
            if (i < p.d) step(k, i);
        }
    };
    each([&](int k, unsigned i) {
        g[k] = load4(p.dh + start + i);
        x[k] = load4(p.r + start + i);
        w[k] = load4(p.weight + i);
        if (p.adds()) old[k] = load4(p.dr + start + i);
    });
    each([&](int k, unsigned) {
        g[k] = times(g[k], w[k]);
        x[k] = times(x[k], rstd);
        chain_step(g[k], x[k], lanes + 4 * k);
    });
    const float c = __fdiv_rn(contract::fold_quads(lanes), __uint2float_rn(p.d));
    each([&](int k, unsigned i) {
        float4 y = input_gradient(g[k], x[k], rstd, c);
        if (p.adds()) y = plus(old[k], y);
        store4(p.dr + start + i, y);
        if (p.copies()) store4(p.ddelta + start + i, y);
    });
}

/// Threads of a block where blocks are split by their kind.
__device__ constexpr unsigned SPLIT_THREADS = 256;

/// The chain of column j over the tokens from `first` on, a multiple of 4, to `end`; 32 tokens are under way
/// together.
template <typename H>
__device__ __forceinline__ float piece_chain(const Params<H>& p, unsigned first, unsigned end, unsigned j) {
    const H* dh = p.dh + (size_t)first * p.d + j;
    const float *r = p.r + (size_t)first * p.d + j, *rstd = p.rstd + first;
    float acc = 0.0f;
    unsigned left = end - first;
    for (; left >= 32; left -= 32, dh += 32 * (size_t)p.d, r += 32 * (size_t)p.d, rstd += 32) {
        H a[32];
        float b[32];
        float4 s[8];
#pragma unroll
        for (int i = 0; i < 32; ++i) a[i] = dh[i * (size_t)p.d], b[i] = r[i * (size_t)p.d];
#pragma unroll
        for (int i = 0; i < 8; ++i) s[i] = load4(rstd + 4 * i);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            acc = __fmaf_rn(storage::widen(a[4 * i]), __fmul_rn(b[4 * i], s[i].x), acc);
            acc = __fmaf_rn(storage::widen(a[4 * i + 1]), __fmul_rn(b[4 * i + 1], s[i].y), acc);
            acc = __fmaf_rn(storage::widen(a[4 * i + 2]), __fmul_rn(b[4 * i + 2], s[i].z), acc);
            acc = __fmaf_rn(storage::widen(a[4 * i + 3]), __fmul_rn(b[4 * i + 3], s[i].w), acc);
        }
    }
#pragma unroll 4
    for (; left > 0; --left, dh += p.d, r += p.d, ++rstd) acc = __fmaf_rn(storage::widen(*dh), __fmul_rn(*r, *rstd), acc);
    return acc;
}

/// Some blocks leave the partial sums of one grain, a thread a piece and column; the others serve rows.
template <typename H>
__device__ __forceinline__ void rows_or_pieces(const Params<H>& p) {
    const unsigned sums = p.cut.pieces(0) * p.d, sum_blocks = (sums + SPLIT_THREADS - 1) / SPLIT_THREADS;
    if (blockIdx.x < sum_blocks) {
        const unsigned sum = blockIdx.x * SPLIT_THREADS + threadIdx.x, piece = sum / p.d, j = sum - piece * p.d;
        if (sum < sums) p.partials[sum] = piece_chain(p, p.cut.first(0, piece), p.cut.end(0, piece), j);
        return;
    }
    const unsigned t = (blockIdx.x - sum_blocks) * (SPLIT_THREADS / 32) + threadIdx.x / 32;
    if (t >= p.cut.tokens) return;
    if (p.d <= SHORT_ROW) short_row_gradient(p, t);
    else row_from_memory<true>(p, t);
}

}  // namespace norm_grad

#define NORM_GRAD_OPERANDS(H)                                                                                 \
    const storage::H *__restrict__ dh, const float *__restrict__ r, const float *__restrict__ weight,         \
        const float *__restrict__ rstd, float *__restrict__ dr, storage::H *__restrict__ ddelta

#define NORM_GRAD_ROWS(NAME, H, QUADS)                                                                        \
    extern "C" __global__ void __launch_bounds__(128)                                                         \
    NAME(NORM_GRAD_OPERANDS(H), unsigned rows, unsigned d, unsigned flags) {                                  \
        norm_grad::rows_alone<QUADS>(norm_grad::Params<storage::H>{                                           \
            dh, r, weight, rstd, dr, ddelta, {rows, rows, rows, 1}, d, flags, nullptr});                      \
    }

#define NORM_GRAD_PIECES(NAME, H, BOUNDS, BODY)                                                               \
    extern "C" __global__ void __launch_bounds__ BOUNDS                                                       \
    NAME(NORM_GRAD_OPERANDS(H), unsigned tokens, unsigned grain, unsigned piece, unsigned d, unsigned flags,  \
         float* partials) {                                                                                   \
        const norm_grad::Params<storage::H> p{dh, r, weight, rstd, dr, ddelta,                                \
                                              {tokens, grain, piece, 1}, d, flags, partials};                 \
        BODY;                                                                                                 \
    }

#define NORM_GRAD_RELAY(NAME, H, BOUNDS, QUADS)                                                               \
    NORM_GRAD_PIECES(NAME, H, BOUNDS, extern __shared__ __align__(16) float rows[];                           \
                     (norm_grad::piece_by_relay<QUADS, true>(p, rows)))

#define NORM_GRAD_RELAY_ROWS(NAME, H, BOUNDS, QUADS)                                                          \
    extern "C" __global__ void __launch_bounds__ BOUNDS                                                       \
    NAME(NORM_GRAD_OPERANDS(H), unsigned rows, unsigned piece, unsigned d, unsigned flags) {                  \
        extern __shared__ __align__(16) float shared[];                                                       \
        norm_grad::piece_by_relay<QUADS, false>(                                                              \
            norm_grad::Params<storage::H>{                                                                    \
                dh, r, weight, rstd, dr, ddelta, {rows, rows, piece, 1}, d, flags, nullptr},                  \
            shared);                                                                                          \
    }

#define RMS_NORM_GRAD_ENTRIES(H)                                                                              \
    NORM_GRAD_ROWS(rms_norm_grad_##H##_rows, H, false)                                                        \
    NORM_GRAD_ROWS(rms_norm_grad_##H##_rows_quads, H, true)                                                   \
    NORM_GRAD_PIECES(rms_norm_grad_##H, H, (512), norm_grad::piece_from_memory<false>(p))                     \
    NORM_GRAD_PIECES(rms_norm_grad_##H##_quads, H, (512, 2), norm_grad::piece_from_memory<true>(p))           \
    NORM_GRAD_RELAY(rms_norm_grad_##H##_relay, H, (256, 2), 0)                                                \
    NORM_GRAD_RELAY(rms_norm_grad_##H##_relay_768, H, (256, 2), 6)                                            \
    NORM_GRAD_RELAY(rms_norm_grad_##H##_relay_1024, H, (256, 2), 8)                                           \
    NORM_GRAD_RELAY(rms_norm_grad_##H##_relay_2048, H, (256), 16)                                             \
    NORM_GRAD_RELAY_ROWS(rms_norm_grad_##H##_rows_768, H, (128, 4), 6)                                        \
    NORM_GRAD_RELAY_ROWS(rms_norm_grad_##H##_rows_1024, H, (128, 4), 8)                                       \
    NORM_GRAD_RELAY_ROWS(rms_norm_grad_##H##_rows_2048, H, (128, 2), 16)                                      \
    NORM_GRAD_PIECES(rms_norm_grad_##H##_split, H, (norm_grad::SPLIT_THREADS, 2), norm_grad::rows_or_pieces(p))
