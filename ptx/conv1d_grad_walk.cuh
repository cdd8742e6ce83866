// The backward of the convolution for a number of taps known beforehand. A warp walks through the positions of one piece, sequence
// after sequence, with all it needs in registers: a thread has `W` neighbouring channels, the inputs and gradients of `v` of the last
// positions, and the chains of its weights. It takes some positions at once and goes on for `TAPS - 1` positions behind the piece,
// whose gradients of `v` the last input gradients need. The warps of a block have the pieces of a group; the last block of a set of
// channels adds what the groups have left.
#pragma once
#include "conv1d_grad.cuh"
#include "conv1d_window.cuh"

namespace conv1d_grad {

/// Pieces of a block, one a warp.
__device__ constexpr unsigned MOST_WARPS = 8;
template <unsigned TAPS, unsigned W, typename T>
struct Walk {
    static constexpr unsigned HALO = TAPS - 1;
    /// Positions at once.
    static constexpr unsigned STEP = 4 / W;
    const Operands<T>& at;
    const Sizes& sizes;
    bool two;
    conv1d::Window<TAPS, W, STEP, T> window;
    /// The gradients of `v` of the positions at hand, and before them those of the `HALO` positions before.
    float dv[HALO + STEP][W];
    /// The chains of the taps, then that of the bias.
    float sums[TAPS + 1][W];

    __device__ __forceinline__ Walk(const Operands<T>& at, const Sizes& sizes, const Before& before, unsigned c, bool two)
        : at(at), sizes(sizes), two(two), window(at.xz, at.weight, at.bias, sizes, before, c), dv{}, sums{} {}

    /// What is read of the positions at hand. What no position is behind keeps what it held.
    struct Inputs {
        few::Stored<W, T> du[STEP], more[STEP], x[STEP];
    };
    /// `count` positions, the first of which has its `u` at `place`. Where there is one part of `du`, the other one adds nothing.
    __device__ __forceinline__ void fetch(Inputs& in, unsigned place, int count) const {
#pragma unroll
        for (unsigned i = 0; i < STEP; ++i, place += sizes.d_inner) {
            if ((int)i >= count) continue;
            in.du[i] = few::fetch<W>(at.du + place);
            in.x[i] = few::fetch<W>(at.xz + (2 * place - window.c));
            if (two) in.more[i] = few::fetch<W>(at.more + place);
        }
    }

    /// The inputs of the positions at hand, and their gradients of `v`.
    __device__ __forceinline__ void values(const Inputs& in) {
#pragma unroll
        for (unsigned i = 0; i < STEP; ++i) {
            float more[W];
            in.x[i].widen(window.x[HALO + i]);
            in.du[i].widen(dv[HALO + i]);
            in.more[i].widen(more);
#pragma unroll
            for (unsigned k = 0; k < W; ++k) {
                float& to = dv[HALO + i][k];
                const float v = window.value(i, k), s = gates::sigmoid(v);
                to = __fmul_rn(__fadd_rn(to, more[k]), __fmul_rn(s, __fmaf_rn(v, __fsub_rn(1.0f, s), 1.0f)));
            }
        }
    }

    /// Goes on with the chains by the position at place `i`.
    __device__ __forceinline__ void add(unsigned i) {
#pragma unroll
        for (unsigned k = 0; k < W; ++k) {
#pragma unroll
            for (unsigned j = 0; j < TAPS; ++j) sums[j][k] = __fmaf_rn(dv[HALO + i][k], window.x[i + j][k], sums[j][k]);
            sums[TAPS][k] = __fadd_rn(sums[TAPS][k], dv[HALO + i][k]);
        }
    }

    /// The input gradients `HALO` positions before those at hand, of which `count` are within the sequence; `place` is that of the first
    /// one's `u`. Only those from number `first` on are positions of this piece, and only those below number `end`.
    template <bool WHOLE>
    __device__ __forceinline__ void inputs(unsigned place, int count, int first, int end) const {
        float v[STEP * W];
#pragma unroll
        for (unsigned i = 0; i < STEP; ++i)
#pragma unroll
            for (unsigned k = 0; k < W; ++k) {
                float sum = 0.0f;
#pragma unroll
                for (unsigned j = 0; j < TAPS; ++j) {
                    // A tap beyond the sequence's end is no part of the chain.
                    if (WHOLE || (int)i - (int)j < count) sum = __fmaf_rn(window.weight[j][k], dv[HALO + i - j][k], sum);
                }
                v[W * i + k] = sum;
            }
        const few::Rounded<T> rounded(v);
#pragma unroll
        for (unsigned i = 0; i < STEP; ++i, place += sizes.d_inner)
            if ((int)i >= first && (WHOLE || (int)i < end)) rounded.template put<W>(at.dxz + (2 * place - window.c), i);
    }

    /// Lets the positions at hand be those before.
    __device__ __forceinline__ void move_on() {
        window.move_on(STEP);
#pragma unroll
        for (unsigned j = 0; j < HALO; ++j)
#pragma unroll
            for (unsigned k = 0; k < W; ++k) dv[j][k] = dv[STEP + j][k];
    }

    /// `own` positions of one sequence from `row` on, of which `after` follow.
    __device__ __forceinline__ void rows(unsigned row, int own, unsigned after) {
        const int all = own + (int)(after < HALO ? after : HALO);
        const unsigned d = sizes.d_inner;
        unsigned place = row * d + window.c;
        Inputs in;
#pragma unroll
        for (unsigned i = 0; i < STEP; ++i) in.more[i] = few::Stored<W, T>::minus_zero();
        fetch(in, place, all);
        int i = 0;
#pragma unroll 1
        for (; i + (int)STEP <= own; i += STEP, place += STEP * d) {
            values(in);
            fetch(in, place + STEP * d, all - i - (int)STEP);
#pragma unroll
            for (unsigned k = 0; k < STEP; ++k) add(k);
            inputs<true>(place - HALO * d, STEP, (int)HALO - i, STEP);
            move_on();
        }
#pragma unroll 1
        for (; i < own + (int)HALO; i += STEP, place += STEP * d) {
            if (i < all) values(in);
            fetch(in, place + STEP * d, all - i - (int)STEP);
#pragma unroll
            for (unsigned k = 0; k < STEP; ++k)
                if (i + (int)k < own) add(k);
            inputs<false>(place - HALO * d, all - i, (int)HALO - i, own + (int)HALO - i);
            move_on();
        }
    }

    /// All positions of a piece.
    __device__ __forceinline__ void piece(unsigned begin, unsigned end) {
        conv1d::for_sequences(begin, end, sizes.seq_len, [&](unsigned row, unsigned b, unsigned t, unsigned own) {
            window.enter(b, t);
            rows(row, (int)own, sizes.seq_len - t - own);
        });
    }
};

/// A block of 32 x `cut.group` threads; d_inner is a multiple of `W`.
template <unsigned TAPS, unsigned W, typename T>
__device__ __forceinline__ void walk(const Operands<T>& at, const Sizes& sizes, const Before& before, bool two, bool weights,
                                     const TokenCut& cut, unsigned* counters, float* partials) {
    constexpr unsigned SET = 32 * W, COLUMNS = SET * (TAPS + 1);
    __shared__ float leaves[MOST_WARPS][COLUMNS];
    const unsigned first = blockIdx.y * SET, c = first + threadIdx.x * W;
    const unsigned per_grain = cut.groups_per_grain(), grain = blockIdx.x / per_grain, group = blockIdx.x % per_grain;
    if (group >= cut.groups(grain)) return;
    const unsigned p = cut.group * group + threadIdx.y, left = cut.pieces(grain) - cut.group * group;
    const unsigned pieces = left < cut.group ? left : cut.group;
    if (threadIdx.y < pieces && c < sizes.d_inner) {
        Walk<TAPS, W, T> mine(at, sizes, before, c, two);
        mine.piece(cut.first(grain, p), cut.end(grain, p));
#pragma unroll
        for (unsigned j = 0; j <= TAPS; ++j)
#pragma unroll
            for (unsigned k = 0; k < W; ++k) leaves[threadIdx.y][j * SET + threadIdx.x * W + k] = mine.sums[j][k];
    }
    if (!weights) return;
    __syncthreads();
    // The rows of one set of channels lie one after another.
    const unsigned rows = cut.grains() * per_grain;
    const contract::GroupRows sums = {partials + (size_t)blockIdx.y * rows * COLUMNS, COLUMNS, counters + blockIdx.y};
    float* row = sums.row(cut, grain, group);
    for (unsigned j = threadIdx.y * 32 + threadIdx.x; j < COLUMNS; j += 32 * blockDim.y) {
        float leaf[MOST_WARPS];
#pragma unroll
        for (unsigned i = 0; i < MOST_WARPS; ++i) leaf[i] = i < pieces ? leaves[i][j] : 0.0f;
        row[j] = contract::tree_registers(leaf, pieces);
    }
    contract::fold_rows(cut, sums, 0, COLUMNS, FromSet<SET>{at.dweight, at.dbias, first, sizes.d_inner, TAPS});
}

}  // namespace conv1d_grad

/// `flags`: 1 where `more` is added to `du`, 2 where sequences go on, 4 with the gradients of the weights. `group`: pieces of a block.
#define CONV1D_GRAD_WALK_ENTRY(NAME, T, TAPS, W)                                                                       \
    extern "C" __global__ void __launch_bounds__(256, 3)                                                               \
    NAME(const T* __restrict__ du, const T* __restrict__ more, const T* __restrict__ xz,                               \
         const float* __restrict__ weight, const float* __restrict__ bias, const float* __restrict__ state,            \
         const unsigned* __restrict__ keep, T* __restrict__ dxz, float* dweight, float* dbias, unsigned seq_len,       \
         unsigned d_inner, unsigned taps, unsigned tokens, unsigned grain, unsigned piece, unsigned group,             \
         unsigned flags, unsigned* counters, float* partials) {                                                        \
        conv1d_grad::walk<TAPS, W, T>({du, more, xz, weight, bias, dxz, dweight, dbias}, {tokens, seq_len, d_inner, taps}, \
                                      {state, keep, (flags & 2) != 0}, (flags & 1) != 0, (flags & 4) != 0,             \
                                      {tokens, grain, piece, group}, counters, partials);                              \
    }
