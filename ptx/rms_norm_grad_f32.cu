// With x = r * rstd, g = dh * weight and c = (sum g * x) / d: dr (+)= rstd * fma(-x, c, g), a warp a row, and
// dweight = the token sum of dh * x, a block a piece: it runs the chains of its piece over what its warps have
// left in shared memory, and the last block folds the pieces.
//
// Where dh and r are small enough to be read twice from the L2 cache, blocks of two kinds share neither
// pieces nor arrivals: some serve rows, the others a few columns of the weight over all tokens.
#include "async.cuh"
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

/// Starts to bring dh and r of a row to shared memory, each thread what it steps over itself.
__device__ __forceinline__ void stage_row(const Params& p, unsigned t, float* dh_row, float* x_row) {
    const size_t start = (size_t)t * p.d;
    for_quads(p.d, [&](unsigned i, int) {
        copy_async_16(dh_row + i, p.dh + start + i, true);
        copy_async_16(x_row + i, p.r + start + i, true);
    });
    copy_async_commit();
}

/// The input gradient of row t by one warp; with STAGED, dh and x of the row go to shared memory, where with
/// QUADS dh and r lie already.
template <bool QUADS, bool STAGED>
__device__ __forceinline__ void row_gradient(const Params& p, unsigned t, float* dh_row, float* x_row) {
    const size_t start = (size_t)t * p.d;
    const float *dh = p.dh + start, *r = p.r + start;
    float* dr = p.dr + start;
    const float rstd = p.rstd[t];
    float lanes[8] = {};
    for_row<QUADS>(p.d, [&](unsigned i, int lane) {
        if constexpr (QUADS) {
            const float4 a = load4(STAGED ? dh_row + i : dh + i), b = load4(STAGED ? x_row + i : r + i);
            const float4 w = load4(p.weight + i);
            const float4 x = make_float4(__fmul_rn(b.x, rstd), __fmul_rn(b.y, rstd), __fmul_rn(b.z, rstd), __fmul_rn(b.w, rstd));
            lanes[lane] = __fmaf_rn(__fmul_rn(a.x, w.x), x.x, lanes[lane]);
            lanes[lane + 1] = __fmaf_rn(__fmul_rn(a.y, w.y), x.y, lanes[lane + 1]);
            lanes[lane + 2] = __fmaf_rn(__fmul_rn(a.z, w.z), x.z, lanes[lane + 2]);
            lanes[lane + 3] = __fmaf_rn(__fmul_rn(a.w, w.w), x.w, lanes[lane + 3]);
            if (STAGED) store4(x_row + i, x);
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
        if (warp < n) {
            float *dh_row = dh_rows + warp * p.d, *x_row = x_rows + warp * p.d;
            if (QUADS && STAGED) {
                stage_row(p, start + warp, dh_row, x_row);
                copy_async_wait<0>();
            }
            row_gradient<QUADS, STAGED>(p, start + warp, dh_row, x_row);
        }
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

/// The longest row of which a thread holds its part in registers: two quads.
__device__ constexpr unsigned SHORT_ROW = 256;

/// The input gradient of a short row by one warp, all its loads under way together.
__device__ __forceinline__ void short_row_gradient(const Params& p, unsigned t) {
    const size_t start = (size_t)t * p.d;
    float4 g[2], x[2], old[2];
    const float rstd = p.rstd[t];
    float lanes[8] = {};
    auto each = [&](auto step) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const unsigned i = 4 * (threadIdx.x & 31u) + 128 * k;
            if (i < p.d) step(k, i);
        }
    };
    float4 w[2];
    each([&](int k, unsigned i) {
        g[k] = load4(p.dh + start + i);
        x[k] = load4(p.r + start + i);
        w[k] = load4(p.weight + i);
        if (p.add != 0) old[k] = load4(p.dr + start + i);
    });
    each([&](int k, unsigned) {
        g[k] = make_float4(__fmul_rn(g[k].x, w[k].x), __fmul_rn(g[k].y, w[k].y), __fmul_rn(g[k].z, w[k].z), __fmul_rn(g[k].w, w[k].w));
        x[k] = make_float4(__fmul_rn(x[k].x, rstd), __fmul_rn(x[k].y, rstd), __fmul_rn(x[k].z, rstd), __fmul_rn(x[k].w, rstd));
        lanes[4 * k] = __fmaf_rn(g[k].x, x[k].x, lanes[4 * k]);
        lanes[4 * k + 1] = __fmaf_rn(g[k].y, x[k].y, lanes[4 * k + 1]);
        lanes[4 * k + 2] = __fmaf_rn(g[k].z, x[k].z, lanes[4 * k + 2]);
        lanes[4 * k + 3] = __fmaf_rn(g[k].w, x[k].w, lanes[4 * k + 3]);
    });
    const float c = __fdiv_rn(fold_quads(lanes), __uint2float_rn(p.d));
    each([&](int k, unsigned i) {
        float4 y = make_float4(input_gradient(g[k].x, x[k].x, rstd, c), input_gradient(g[k].y, x[k].y, rstd, c),
                               input_gradient(g[k].z, x[k].z, rstd, c), input_gradient(g[k].w, x[k].w, rstd, c));
        if (p.add != 0) y = make_float4(__fadd_rn(old[k].x, y.x), __fadd_rn(old[k].y, y.y), __fadd_rn(old[k].z, y.z), __fadd_rn(old[k].w, y.w));
        store4(p.dr + start + i, y);
    });
}

/// Blocks that are split by their kind: threads, columns of a block of columns, and the most pieces of a sum.
__device__ constexpr unsigned SPLIT_THREADS = 256;
__device__ constexpr unsigned SPLIT_COLUMNS = 8;
__device__ constexpr unsigned SPLIT_PIECES = 256;

/// The chain of column j over the tokens from `first` on, a multiple of 4, to `end`; 32 tokens are under way
/// together.
__device__ __forceinline__ float piece_chain(const Params& p, unsigned first, unsigned end, unsigned j) {
    const float *dh = p.dh + (size_t)first * p.d + j, *r = p.r + (size_t)first * p.d + j, *rstd = p.rstd + first;
    float acc = 0.0f;
    unsigned left = end - first;
    for (; left >= 32; left -= 32, dh += 32 * (size_t)p.d, r += 32 * (size_t)p.d, rstd += 32) {
        float a[32], b[32];
        float4 s[8];
#pragma unroll
        for (int i = 0; i < 32; ++i) a[i] = dh[i * (size_t)p.d], b[i] = r[i * (size_t)p.d];
#pragma unroll
        for (int i = 0; i < 8; ++i) s[i] = load4(rstd + 4 * i);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            acc = __fmaf_rn(a[4 * i], __fmul_rn(b[4 * i], s[i].x), acc);
            acc = __fmaf_rn(a[4 * i + 1], __fmul_rn(b[4 * i + 1], s[i].y), acc);
            acc = __fmaf_rn(a[4 * i + 2], __fmul_rn(b[4 * i + 2], s[i].z), acc);
            acc = __fmaf_rn(a[4 * i + 3], __fmul_rn(b[4 * i + 3], s[i].w), acc);
        }
    }
#pragma unroll 4
    for (; left > 0; --left, dh += p.d, r += p.d, ++rstd) acc = __fmaf_rn(*dh, __fmul_rn(*r, *rstd), acc);
    return acc;
}

/// The weight gradient of a few columns over all tokens of one grain: a thread a piece and column, then the
/// tree, eight nodes a thread and round.
__device__ __forceinline__ void columns_alone(const Params& p, unsigned first_column) {
    __shared__ float leaves[SPLIT_PIECES][SPLIT_COLUMNS];
    constexpr unsigned LINES = SPLIT_THREADS / SPLIT_COLUMNS;
    const unsigned c = threadIdx.x % SPLIT_COLUMNS, line = threadIdx.x / SPLIT_COLUMNS, j = first_column + c;
    const unsigned pieces = p.cut.pieces(0);
    if (j < p.d) {
        for (unsigned q = line; q < pieces; q += LINES) leaves[q][c] = piece_chain(p, p.cut.first(0, q), p.cut.end(0, q), j);
    }
    __syncthreads();
    for (unsigned span = 1; span < pieces; span *= 8) {
        const unsigned nodes = (pieces + span - 1) / span, groups = (nodes + 7) / 8;
        for (unsigned g = line; g < groups; g += LINES) {
            const unsigned n = nodes - 8 * g < 8 ? nodes - 8 * g : 8;
            float leaf[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) leaf[i] = i < n ? leaves[(8 * g + i) * span][c] : 0.0f;
            leaves[8 * g * span][c] = tree_registers(leaf, n);
        }
        __syncthreads();
    }
    if (line == 0 && j < p.d) p.dweight[j] = leaves[0][c];
}

/// Blocks of columns come first: theirs is the longer way.
__device__ __forceinline__ void rows_or_columns(const Params& p) {
    const unsigned column_blocks = (p.d + SPLIT_COLUMNS - 1) / SPLIT_COLUMNS;
    if (blockIdx.x < column_blocks) {
        columns_alone(p, blockIdx.x * SPLIT_COLUMNS);
        return;
    }
    const unsigned t = (blockIdx.x - column_blocks) * (SPLIT_THREADS / 32) + threadIdx.x / 32;
    if (t >= p.cut.tokens) return;
    if (p.d <= SHORT_ROW) short_row_gradient(p, t);
    else row_gradient<true, false>(p, t, nullptr, nullptr);
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

extern "C" __global__ void __launch_bounds__(SPLIT_THREADS, 2)
rms_norm_grad_f32_split(const float* __restrict__ dh, const float* __restrict__ r, const float* __restrict__ weight,
                        const float* __restrict__ rstd, float* __restrict__ dr, float* __restrict__ dweight,
                        unsigned tokens, unsigned piece, unsigned d, unsigned add) {
    rows_or_columns(Params{dh, r, weight, rstd, dr, dweight, {tokens, tokens, piece, 1}, d, add, nullptr, nullptr});
}
