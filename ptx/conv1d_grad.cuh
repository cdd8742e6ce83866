// The backward of the convolution for any number of taps. A block of 32 x 8 threads serves 32 channels and a group of pieces of a grain, piece after
// piece and each in tiles of 32 positions: inputs and gradients of `v` of a tile, and of the d_conv - 1 positions on both
// sides that it needs, lie in shared memory; from them come the input gradient of each position, and the chains of the weights, one
// a thread. The last block of a set of channels adds what the groups have left.
#pragma once
#include "conv1d.cuh"

namespace conv1d_grad {

using conv1d::Before;
using conv1d::Sizes;
using contract::TokenCut;

__device__ constexpr unsigned TILE = 32;
__device__ constexpr unsigned MOST_TAPS = 16;

template <typename T>
struct Operands {
    const T *du, *more, *xz;
    const float *weight, *bias;
    T* dxz;
    float *dweight, *dbias;
};

/// Where the fold of the sums of a set of channels leaves column j: `SET` columns a tap, then those of the bias.
template <unsigned SET>
struct FromSet {
    float *dweight, *dbias;
    unsigned first, d_inner, taps;

    __device__ __forceinline__ void operator()(unsigned j, float sum) const {
        const unsigned c = first + j % SET, tap = j / SET;
        if (c >= d_inner) return;
        if (tap < taps) dweight[(size_t)c * taps + tap] = sum;
        else dbias[c] = sum;
    }
};

struct Shared {
    static constexpr unsigned HALO = MOST_TAPS - 1;
    /// From d_conv - 1 positions before the tile on.
    float x[TILE + 2 * HALO][32];
    float dv[TILE + HALO][32];
};

template <typename T>
struct Piece {
    const Operands<T>& at;
    const Sizes& sizes;
    const Before& before;
    Shared& shared;
    unsigned c;
    bool two;

    __device__ __forceinline__ unsigned taps() const { return sizes.taps; }
    /// The position in its sequence of the row 8 rows after one at position `t`.
    __device__ __forceinline__ unsigned later(unsigned t) const {
        return t + 8 < sizes.seq_len ? t + 8 : (t + 8) % sizes.seq_len;
    }
    __device__ __forceinline__ bool there() const { return c < sizes.d_inner; }

    /// What tap `j` reads for row `row`, the tile beginning at `tile`.
    __device__ __forceinline__ float input(unsigned tile, unsigned row, unsigned t, unsigned j, unsigned lane) const {
        const unsigned back = taps() - 1 - j;
        if (t >= back) return shared.x[row - back + taps() - 1 - tile][lane];
        return c - threadIdx.x + lane < sizes.d_inner
                   ? before.input(sizes, row / sizes.seq_len, c - threadIdx.x + lane, t + j)
                   : 0.0f;
    }

    /// Inputs and gradients of `v` of the positions `tile .. end` and what they need around them.
    __device__ __forceinline__ void load(unsigned tile, unsigned end) const {
        const unsigned halo = taps() - 1, d = sizes.d_inner;
        const unsigned low = tile < halo ? 0 : tile - halo;
        const unsigned high = sizes.rows - end < halo ? sizes.rows : end + halo;
#pragma unroll 4
        for (unsigned row = low + threadIdx.y; row < high; row += 8)
            shared.x[row + halo - tile][threadIdx.x] = there() ? quads::number(at.xz[(size_t)row * 2 * d + c]) : 0.0f;
        __syncthreads();
        if (!there()) return;
        const float bias = at.bias[c];
        unsigned t = (tile + threadIdx.y) % sizes.seq_len;
#pragma unroll 4
        for (unsigned row = tile + threadIdx.y; row < high; row += 8) {
            float du = quads::number(at.du[(size_t)row * d + c]);
            if (two) du = __fadd_rn(du, quads::number(at.more[(size_t)row * d + c]));
            float v = 0.0f;
            for (unsigned j = 0; j < taps(); ++j)
                v = __fmaf_rn(at.weight[(size_t)c * taps() + j], input(tile, row, t, j, threadIdx.x), v);
            v = __fadd_rn(v, bias);
            const float s = contract::sigmoid(v);
            shared.dv[row - tile][threadIdx.x] = __fmul_rn(du, __fmul_rn(s, __fmaf_rn(v, __fsub_rn(1.0f, s), 1.0f)));
            t = later(t);
        }
    }

    /// The input gradients of the positions `tile .. end`.
    __device__ __forceinline__ void inputs(unsigned tile, unsigned end) const {
        if (!there()) return;
        unsigned t = (tile + threadIdx.y) % sizes.seq_len;
        for (unsigned row = tile + threadIdx.y; row < end; row += 8, t = later(t)) {
            const unsigned left = sizes.seq_len - t;
            float dx = 0.0f;
#pragma unroll
            for (unsigned j = 0; j < MOST_TAPS; ++j) {
                if (j >= taps()) break;
                const unsigned ahead = taps() - 1 - j;
                // A tap beyond the sequence's end is no part of the chain.
                if (ahead < left) dx = __fmaf_rn(at.weight[(size_t)c * taps() + j], shared.dv[row - tile + ahead][threadIdx.x], dx);
            }
            at.dxz[(size_t)row * 2 * sizes.d_inner + c] = quads::Round<T>::to(dx);
        }
    }

    /// Goes on with a chain over the positions `tile .. end`: of tap `which`, or of the bias.
    __device__ __forceinline__ float chain(float acc, unsigned which, unsigned lane, unsigned tile, unsigned end) const {
        unsigned t = tile % sizes.seq_len;
        for (unsigned row = tile; row < end; ++row) {
            const float dv = shared.dv[row - tile][lane];
            acc = which < taps() ? __fmaf_rn(dv, input(tile, row, t, which, lane), acc) : __fadd_rn(acc, dv);
            t = t + 1 == sizes.seq_len ? 0 : t + 1;
        }
        return acc;
    }
};

/// Serves every d_conv up to `MOST_TAPS`. Chains of a thread: each thread of a block has `SUMS` of them.
template <typename T>
__device__ __forceinline__ void backward(const Operands<T>& at, const Sizes& sizes, const Before& before, bool two, bool weights,
                                         const TokenCut& cut, unsigned* counters, float* partials) {
    // The chains of 32 channels: each tap, and the bias.
    constexpr unsigned SUMS = (32 * (MOST_TAPS + 1) + 255) / 256;
    __shared__ Shared shared;
    const unsigned me = threadIdx.y * 32 + threadIdx.x, first = blockIdx.y * 32;
    const Piece<T> piece = {at, sizes, before, shared, first + threadIdx.x, two};
    const unsigned taps = piece.taps(), columns = 32 * (taps + 1);
    const unsigned per_grain = cut.groups_per_grain(), grain = blockIdx.x / per_grain, group = blockIdx.x % per_grain;
    if (group >= cut.groups(grain)) return;
    const unsigned left = cut.pieces(grain) - cut.group * group, pieces = left < cut.group ? left : cut.group;
    contract::TreeStack<4> leaves[SUMS];
    for (unsigned p = 0; p < pieces; ++p) {
        const unsigned begin = cut.first(grain, cut.group * group + p), end = cut.end(grain, cut.group * group + p);
        float acc[SUMS] = {};
        for (unsigned tile = begin; tile < end; tile += TILE) {
            const unsigned tile_end = end - tile < TILE ? end : tile + TILE;
            piece.load(tile, tile_end);
            __syncthreads();
            piece.inputs(tile, tile_end);
            if (weights) {
#pragma unroll
                for (unsigned s = 0; s < SUMS; ++s) {
                    const unsigned which = me + 256 * s;
                    if (which < columns && first + which % 32 < sizes.d_inner)
                        acc[s] = piece.chain(acc[s], which / 32, which % 32, tile, tile_end);
                }
            }
            __syncthreads();
        }
#pragma unroll
        for (unsigned s = 0; s < SUMS; ++s) leaves[s].push(acc[s], p);
    }
    if (!weights) return;
    // The rows of one set of channels lie one after another.
    const unsigned rows = cut.grains() * per_grain;
    const contract::GroupRows sums = {partials + (size_t)blockIdx.y * rows * columns, columns, counters + blockIdx.y};
    float* row = sums.row(cut, grain, group);
#pragma unroll
    for (unsigned s = 0; s < SUMS; ++s)
        if (me + 256 * s < columns) row[me + 256 * s] = leaves[s].finish(pieces);
    contract::fold_rows(cut, sums, 0, columns, FromSet<32>{at.dweight, at.dbias, first, sizes.d_inner, taps});
}

}  // namespace conv1d_grad

/// `flags`: 1 where `more` is added to `du`, 2 where sequences go on, 4 with the gradients of the weights.
#define CONV1D_GRAD_ENTRY(NAME, T)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                               \
    NAME(const T* __restrict__ du, const T* __restrict__ more, const T* __restrict__ xz,                               \
         const float* __restrict__ weight, const float* __restrict__ bias, const float* __restrict__ state,            \
         const unsigned* __restrict__ keep, T* __restrict__ dxz, float* dweight, float* dbias, unsigned seq_len,       \
         unsigned d_inner, unsigned taps, unsigned tokens, unsigned grain, unsigned piece, unsigned group,             \
         unsigned flags, unsigned* counters, float* partials) {                                                        \
        conv1d_grad::backward<T>({du, more, xz, weight, bias, dxz, dweight, dbias}, {tokens, seq_len, d_inner, taps}, \
                                 {state, keep, (flags & 2) != 0}, (flags & 1) != 0, (flags & 4) != 0,                  \
                                 {tokens, grain, piece, group}, counters, partials);                                   \
    }
