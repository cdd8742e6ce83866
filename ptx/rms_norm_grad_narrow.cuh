// With x = r * rstd, g = dh * weight and c = (sum g * x) / d: dr (+)= rstd * fma(-x, c, g), a warp a row, and
// dweight = the token sum of dh * x, a block a piece: it runs the chains of its piece over what its warps have
// left in shared memory, and the last block folds the pieces. The residual stream and its gradient are stored in
// f32, dh and the copy of dr, which is the gradient of what the norm has added, in H.
#pragma once
#include "contract.cuh"
#include "narrow.cuh"

namespace norm_grad {

using contract::load4;
using contract::store4;
using narrow::load4;
using narrow::store4;

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
    float* dweight;
    contract::TokenCut cut;
    unsigned d;
    unsigned flags;
    unsigned* counters;
    float* partials;
};

__device__ __forceinline__ float input_gradient(float g, float x, float rstd, float c) {
    return __fmul_rn(rstd, __fmaf_rn(contract::negate(x), c, g));
}

/// Steps over one row: an element alone, or the four from a quad.
template <bool QUADS, typename Step>
__device__ __forceinline__ void for_row(unsigned d, Step step) {
    if (QUADS) contract::for_quads(d, step);
    else contract::for_strided(d, step);
}

/// The input gradient of row t by one warp; with STAGED, dh and x of the row go to shared memory.
template <bool QUADS, bool STAGED, typename H>
__device__ __forceinline__ void row_gradient(const Params<H>& p, unsigned t, float* dh_row, float* x_row) {
    const size_t start = (size_t)t * p.d;
    const H* dh = p.dh + start;
    const float* r = p.r + start;
    float* dr = p.dr + start;
    const float rstd = p.rstd[t];
    float lanes[8] = {};
    for_row<QUADS>(p.d, [&](unsigned i, int lane) {
        if constexpr (QUADS) {
            const float4 a = load4(dh + i), b = load4(r + i), w = load4(p.weight + i);
            const float4 x = make_float4(__fmul_rn(b.x, rstd), __fmul_rn(b.y, rstd), __fmul_rn(b.z, rstd), __fmul_rn(b.w, rstd));
            lanes[lane] = __fmaf_rn(__fmul_rn(a.x, w.x), x.x, lanes[lane]);
            lanes[lane + 1] = __fmaf_rn(__fmul_rn(a.y, w.y), x.y, lanes[lane + 1]);
            lanes[lane + 2] = __fmaf_rn(__fmul_rn(a.z, w.z), x.z, lanes[lane + 2]);
            lanes[lane + 3] = __fmaf_rn(__fmul_rn(a.w, w.w), x.w, lanes[lane + 3]);
            if (STAGED) {
                store4(dh_row + i, a);
                store4(x_row + i, x);
            }
        } else {
            const float a = narrow::widen(dh[i]), x = __fmul_rn(r[i], rstd);
            lanes[lane] = __fmaf_rn(__fmul_rn(a, p.weight[i]), x, lanes[lane]);
            if (STAGED) {
                dh_row[i] = a;
                x_row[i] = x;
            }
        }
    });
    const float c = __fdiv_rn(QUADS ? contract::fold_quads(lanes) : contract::fold_strided(lanes), __uint2float_rn(p.d));
    for_row<QUADS>(p.d, [&](unsigned i, int) {
        if constexpr (QUADS) {
            const float4 a = STAGED ? load4(dh_row + i) : load4(dh + i), w = load4(p.weight + i);
            float4 x = load4(STAGED ? x_row + i : r + i);
            if (!STAGED) x = make_float4(__fmul_rn(x.x, rstd), __fmul_rn(x.y, rstd), __fmul_rn(x.z, rstd), __fmul_rn(x.w, rstd));
            float4 y = make_float4(input_gradient(__fmul_rn(a.x, w.x), x.x, rstd, c), input_gradient(__fmul_rn(a.y, w.y), x.y, rstd, c),
                                   input_gradient(__fmul_rn(a.z, w.z), x.z, rstd, c), input_gradient(__fmul_rn(a.w, w.w), x.w, rstd, c));
            if ((p.flags & ADD) != 0) {
                const float4 old = load4(dr + i);
                y = make_float4(__fadd_rn(old.x, y.x), __fadd_rn(old.y, y.y), __fadd_rn(old.z, y.z), __fadd_rn(old.w, y.w));
            }
            store4(dr + i, y);
            if ((p.flags & COPY) != 0) store4(p.ddelta + start + i, y);
        } else {
            const float x = STAGED ? x_row[i] : __fmul_rn(r[i], rstd);
            float y = input_gradient(__fmul_rn(STAGED ? dh_row[i] : narrow::widen(dh[i]), p.weight[i]), x, rstd, c);
            if ((p.flags & ADD) != 0) y = __fadd_rn(dr[i], y);
            dr[i] = y;
            if ((p.flags & COPY) != 0) p.ddelta[start + i] = narrow::narrowed<H>(y);
        }
    });
}

/// Without a weight gradient: a warp a row.
template <bool QUADS, typename H>
__device__ __forceinline__ void rows_alone(const Params<H>& p) {
    const unsigned t = blockIdx.x * 4 + threadIdx.x / 32;
    if (t < p.cut.tokens) row_gradient<QUADS, false>(p, t, nullptr, nullptr);
}

/// The chains of a piece whose rows are read again from memory.
template <typename H>
__device__ __forceinline__ void chains_from_memory(const Params<H>& p, unsigned first, unsigned end, float* partial) {
    for (unsigned j = threadIdx.x; j < p.d; j += blockDim.x) {
        float acc = 0.0f;
#pragma unroll 8
        for (unsigned t = first; t < end; ++t) {
            const size_t i = (size_t)t * p.d + j;
            acc = __fmaf_rn(narrow::widen(p.dh[i]), __fmul_rn(p.r[i], p.rstd[t]), acc);
        }
        partial[j] = acc;
    }
}

template <bool QUADS, bool STAGED, typename H>
__device__ __forceinline__ void rows_and_weight(const Params<H>& p) {
    // STAGED: for each warp a row of dh, for each a row of x, then the chains of all columns.
    extern __shared__ __align__(16) float shared[];
    const unsigned warps = blockDim.x / 32, warp = threadIdx.x / 32;
    const unsigned pieces = p.cut.pieces_per_grain();
    const unsigned grain = blockIdx.x / pieces, piece = blockIdx.x % pieces;
    if (piece >= p.cut.pieces(grain)) return;
    const unsigned first = p.cut.first(grain, piece), end = p.cut.end(grain, piece);
    float* partial = p.partials + (size_t)blockIdx.x * p.d;
    float *dh_rows = shared, *x_rows = shared + warps * p.d, *chains = shared + 2 * warps * p.d;
    for (unsigned start = first; start < end; start += warps) {
        const unsigned n = end - start < warps ? end - start : warps;
        if (warp < n) row_gradient<QUADS, STAGED>(p, start + warp, dh_rows + warp * p.d, x_rows + warp * p.d);
        if (!STAGED) continue;
        __syncthreads();
        for (unsigned j = threadIdx.x; j < p.d; j += blockDim.x) {
            float acc = start == first ? 0.0f : chains[j];
#pragma unroll 8
            for (unsigned k = 0; k < n; ++k) acc = __fmaf_rn(dh_rows[k * p.d + j], x_rows[k * p.d + j], acc);
            if (start + warps < end) chains[j] = acc;
            else partial[j] = acc;
        }
        __syncthreads();
    }
    if (!STAGED) chains_from_memory(p, first, end, partial);

    // Pieces of a group fold into the row of its first piece, then groups into the sum.
    contract::TokenCut cut = p.cut;
    if (cut.group > 1) {
        const unsigned group = piece / cut.group, lead = group * cut.group;
        const unsigned n = cut.pieces(grain) - lead < cut.group ? cut.pieces(grain) - lead : cut.group;
        if (!contract::last_arrival(p.counters + 1 + grain * cut.groups_per_grain() + group, n)) return;
        float* rows = p.partials + ((size_t)grain * pieces + lead) * p.d;
        const contract::LeafSets leaves{rows, p.d, 1, 0, p.d};
        contract::fold_sets(leaves, n, [&](unsigned) { return n; }, contract::ToRow{rows});
    }
    // Rows of groups: one every `group` pieces, those of a grain from its first piece on.
    const unsigned grains = cut.grains(), most = cut.groups_per_grain();
    if (!contract::last_arrival(p.counters, (grains - 1) * most + cut.groups(grains - 1))) return;
    const size_t leaf_stride = (size_t)cut.group * p.d, set_stride = (size_t)pieces * p.d;
    if (grains > 1 && most > 1)
        contract::fold_sets(contract::LeafSets{p.partials, p.d, grains, set_stride, leaf_stride}, most,
                  [&](unsigned s) { return cut.groups(s); }, contract::ToRow{p.dweight});
    const bool whole = grains > 1;
    contract::fold_sets(contract::LeafSets{p.partials, p.d, 1, 0, whole ? set_stride : leaf_stride}, whole ? grains : most,
              [&](unsigned) { return whole ? grains : cut.groups(0); }, contract::ToRow{p.dweight});
}

}  // namespace norm_grad

#define RMS_NORM_GRAD_ROWS(NAME, H, QUADS)                                                                    \
    extern "C" __global__ void __launch_bounds__(128)                                                         \
    NAME(const narrow::H* __restrict__ dh, const float* __restrict__ r, const float* __restrict__ weight,     \
         const float* __restrict__ rstd, float* __restrict__ dr, narrow::H* __restrict__ ddelta,              \
         unsigned rows, unsigned d, unsigned flags) {                                                         \
        norm_grad::rows_alone<QUADS>(norm_grad::Params<narrow::H>{                                            \
            dh, r, weight, rstd, dr, ddelta, nullptr, {rows, rows, rows, 1}, d, flags, nullptr, nullptr});    \
    }

#define RMS_NORM_GRAD_WEIGHT(NAME, H, QUADS, STAGED)                                                          \
    extern "C" __global__ void __launch_bounds__(1024)                                                        \
    NAME(const narrow::H* __restrict__ dh, const float* __restrict__ r, const float* __restrict__ weight,     \
         const float* __restrict__ rstd, float* __restrict__ dr, narrow::H* __restrict__ ddelta,              \
         float* __restrict__ dweight, unsigned tokens, unsigned grain, unsigned piece, unsigned group,        \
         unsigned d, unsigned flags, unsigned* counters, float* partials) {                                   \
        const contract::TokenCut cut{tokens, grain, piece, group};                                            \
        norm_grad::rows_and_weight<QUADS, STAGED>(norm_grad::Params<narrow::H>{                               \
            dh, r, weight, rstd, dr, ddelta, dweight, cut, d, flags, counters, partials});                    \
    }

#define RMS_NORM_GRAD_ENTRIES(H)                                                                              \
    RMS_NORM_GRAD_ROWS(rms_norm_grad_##H##_rows, H, false)                                                    \
    RMS_NORM_GRAD_ROWS(rms_norm_grad_##H##_rows_quads, H, true)                                               \
    RMS_NORM_GRAD_WEIGHT(rms_norm_grad_##H, H, false, false)                                                  \
    RMS_NORM_GRAD_WEIGHT(rms_norm_grad_##H##_quads, H, true, false)                                           \
    RMS_NORM_GRAD_WEIGHT(rms_norm_grad_##H##_staged, H, false, true)                                          \
    RMS_NORM_GRAD_WEIGHT(rms_norm_grad_##H##_staged_quads, H, true, true)
