// With x = r * rstd, g = dh * weight and c = (sum g * x) / d: dr (+)= rstd * fma(-x, c, g), a warp a row, and
// dweight = the token sum of dh * x, a block a piece: it runs the chains of its piece over what its warps have
// left in shared memory, and the last block folds the pieces.
#include "contract.cuh"

using namespace contract;

struct Params {
    const float* dh;
    const float* r;
    const float* weight;
    const float* rstd;
    float* dr;
    float* dweight;
    TokenCut cut;
    unsigned d;
    unsigned add;
    unsigned* counters;
    float* partials;
};

__device__ __forceinline__ float input_gradient(float g, float x, float rstd, float c) {
    return __fmul_rn(rstd, __fmaf_rn(negate(x), c, g));
}

/// Steps over one row: an element alone, or the four from a quad.
template <bool QUADS, typename Step>
__device__ __forceinline__ void for_row(unsigned d, Step step) {
    if (QUADS) for_quads(d, step);
    else for_strided(d, step);
}

/// The input gradient of row t by one warp; with STAGED, dh and x of the row go to shared memory.
template <bool QUADS, bool STAGED>
__device__ __forceinline__ void row_gradient(const Params& p, unsigned t, float* dh_row, float* x_row) {
    const size_t start = (size_t)t * p.d;
    const float *dh = p.dh + start, *r = p.r + start;
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
            const float a = dh[i], x = __fmul_rn(r[i], rstd);
            lanes[lane] = __fmaf_rn(__fmul_rn(a, p.weight[i]), x, lanes[lane]);
            if (STAGED) {
                dh_row[i] = a;
                x_row[i] = x;
            }
        }
    });
    const float c = __fdiv_rn(QUADS ? fold_quads(lanes) : fold_strided(lanes), __uint2float_rn(p.d));
    for_row<QUADS>(p.d, [&](unsigned i, int) {
        if constexpr (QUADS) {
            const float4 a = load4(STAGED ? dh_row + i : dh + i), w = load4(p.weight + i);
            float4 x = load4(STAGED ? x_row + i : r + i);
            if (!STAGED) x = make_float4(__fmul_rn(x.x, rstd), __fmul_rn(x.y, rstd), __fmul_rn(x.z, rstd), __fmul_rn(x.w, rstd));
            float4 y = make_float4(input_gradient(__fmul_rn(a.x, w.x), x.x, rstd, c), input_gradient(__fmul_rn(a.y, w.y), x.y, rstd, c),
                                   input_gradient(__fmul_rn(a.z, w.z), x.z, rstd, c), input_gradient(__fmul_rn(a.w, w.w), x.w, rstd, c));
            if (p.add != 0) {
                const float4 old = load4(dr + i);
                y = make_float4(__fadd_rn(old.x, y.x), __fadd_rn(old.y, y.y), __fadd_rn(old.z, y.z), __fadd_rn(old.w, y.w));
            }
            store4(dr + i, y);
        } else {
            const float x = STAGED ? x_row[i] : __fmul_rn(r[i], rstd);
            const float y = input_gradient(__fmul_rn(STAGED ? dh_row[i] : dh[i], p.weight[i]), x, rstd, c);
            dr[i] = p.add != 0 ? __fadd_rn(dr[i], y) : y;
        }
    });
}

/// Without a weight gradient: a warp a row.
template <bool QUADS>
__device__ __forceinline__ void rows_alone(const Params& p) {
    const unsigned t = blockIdx.x * 4 + threadIdx.x / 32;
    if (t < p.cut.tokens) row_gradient<QUADS, false>(p, t, nullptr, nullptr);
}

/// The chains of a piece whose rows are read again from memory.
__device__ __forceinline__ void chains_from_memory(const Params& p, unsigned first, unsigned end, float* partial) {
    for (unsigned j = threadIdx.x; j < p.d; j += blockDim.x) {
        float acc = 0.0f;
#pragma unroll 8
        for (unsigned t = first; t < end; ++t) {
            const size_t i = (size_t)t * p.d + j;
            acc = __fmaf_rn(p.dh[i], __fmul_rn(p.r[i], p.rstd[t]), acc);
        }
        partial[j] = acc;
    }
}

template <bool QUADS, bool STAGED>
__device__ __forceinline__ void rows_and_weight(const Params& p) {
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
    TokenCut cut = p.cut;
    if (cut.group > 1) {
        const unsigned group = piece / cut.group, lead = group * cut.group;
        const unsigned n = cut.pieces(grain) - lead < cut.group ? cut.pieces(grain) - lead : cut.group;
        if (!last_arrival(p.counters + 1 + grain * cut.groups_per_grain() + group, n)) return;
        float* rows = p.partials + ((size_t)grain * pieces + lead) * p.d;
        const LeafSets leaves{rows, p.d, 1, 0, p.d};
        fold_sets(leaves, n, [&](unsigned) { return n; }, ToRow{rows});
    }
    // Rows of groups: one every `group` pieces, those of a grain from its first piece on.
    const unsigned grains = cut.grains(), most = cut.groups_per_grain();
    if (!last_arrival(p.counters, (grains - 1) * most + cut.groups(grains - 1))) return;
    const size_t leaf_stride = (size_t)cut.group * p.d, set_stride = (size_t)pieces * p.d;
    if (grains > 1 && most > 1)
        fold_sets(LeafSets{p.partials, p.d, grains, set_stride, leaf_stride}, most,
                  [&](unsigned s) { return cut.groups(s); }, ToRow{p.dweight});
    const bool whole = grains > 1;
    fold_sets(LeafSets{p.partials, p.d, 1, 0, whole ? set_stride : leaf_stride}, whole ? grains : most,
              [&](unsigned) { return whole ? grains : cut.groups(0); }, ToRow{p.dweight});
}

#define ROWS(NAME, QUADS)                                                                                     \
    extern "C" __global__ void __launch_bounds__(128)                                                         \
    NAME(const float* __restrict__ dh, const float* __restrict__ r, const float* __restrict__ weight,         \
         const float* __restrict__ rstd, float* __restrict__ dr, unsigned rows, unsigned d, unsigned add) {   \
        rows_alone<QUADS>(Params{dh, r, weight, rstd, dr, nullptr, {rows, rows, rows, 1}, d, add, nullptr, nullptr}); \
    }

#define WEIGHT(NAME, QUADS, STAGED)                                                                           \
    extern "C" __global__ void __launch_bounds__(1024)                                                        \
    NAME(const float* __restrict__ dh, const float* __restrict__ r, const float* __restrict__ weight,         \
         const float* __restrict__ rstd, float* __restrict__ dr, float* __restrict__ dweight,                 \
         unsigned tokens, unsigned grain, unsigned piece, unsigned group, unsigned d, unsigned add,           \
         unsigned* counters, float* partials) {                                                               \
        const TokenCut cut{tokens, grain, piece, group};                                                      \
        rows_and_weight<QUADS, STAGED>(Params{dh, r, weight, rstd, dr, dweight, cut, d, add, counters, partials}); \
    }

ROWS(rms_norm_grad_f32_rows, false)
ROWS(rms_norm_grad_f32_rows_quads, true)
WEIGHT(rms_norm_grad_f32, false, false)
WEIGHT(rms_norm_grad_f32_quads, true, false)
WEIGHT(rms_norm_grad_f32_staged, false, true)
WEIGHT(rms_norm_grad_f32_staged_quads, true, true)
