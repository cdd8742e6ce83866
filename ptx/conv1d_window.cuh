// The convolution for a number of taps known beforehand: what a thread that walks through positions keeps in registers.
#pragma once
#include "conv1d.cuh"
#include "few.cuh"
#include "gates.cuh"

namespace conv1d {

/// Of `W` neighbouring channels from `c` on: the weights, and the inputs of `STEP` positions at hand and of the `HALO` before them.
template <unsigned TAPS, unsigned W, unsigned STEP, typename T>
struct Window {
    static constexpr unsigned HALO = TAPS - 1;
    const T* xz;
    const Sizes& sizes;
    const Before& before;
    unsigned c;
    float weight[TAPS][W], bias[W], x[HALO + STEP][W];

    __device__ __forceinline__ Window(const T* xz, const float* weights, const float* biases, const Sizes& sizes, const Before& before,
                                      unsigned c)
        : xz(xz), sizes(sizes), before(before), c(c) {
#pragma unroll
        for (unsigned k = 0; k < W; ++k) {
            bias[k] = biases[c + k];
#pragma unroll
            for (unsigned j = 0; j < TAPS; ++j) weight[j][k] = weights[(size_t)(c + k) * TAPS + j];
        }
    }

    /// The inputs before position `t` of sequence `b`.
    __device__ __forceinline__ void enter(unsigned b, unsigned t) {
        const T* p = xz + (size_t)(b * sizes.seq_len + t) * 2 * sizes.d_inner + c;
#pragma unroll
        for (unsigned j = 0; j < HALO; ++j) {
            const unsigned back = HALO - j;
            if (t >= back) {
                few::fetch<W>(p - (size_t)back * 2 * sizes.d_inner).widen(x[j]);
            } else {
#pragma unroll
                for (unsigned k = 0; k < W; ++k) x[j][k] = before.input(sizes, b, c + k, t + j);
            }
        }
    }

    /// What is before SiLU, at place `i` of the positions at hand and channel `k`.
    __device__ __forceinline__ float value(unsigned i, unsigned k) const {
        float v = 0.0f;
#pragma unroll
        for (unsigned j = 0; j < TAPS; ++j) v = __fmaf_rn(weight[j][k], x[i + j][k], v);
        return __fadd_rn(v, bias[k]);
    }

    /// Lets the inputs of the `taken` positions at hand be those before.
    __device__ __forceinline__ void move_on(unsigned taken) {
#pragma unroll
        for (unsigned j = 0; j < HALO; ++j)
#pragma unroll
            for (unsigned k = 0; k < W; ++k) x[j][k] = x[taken + j][k];
    }
};

/// Calls `part(first row, b, t, rows)` for each sequence that has rows of `begin .. end`.
template <typename Part>
__device__ __forceinline__ void for_sequences(unsigned begin, unsigned end, unsigned seq_len, Part part) {
    unsigned b = begin / seq_len, t = begin % seq_len;
#pragma unroll 1
    for (unsigned row = begin; row < end; ++b, t = 0) {
        const unsigned left = seq_len - t, own = end - row < left ? end - row : left;
        part(row, b, t, own);
        row += own;
    }
}

/// Forward by threads of `W` channels that take `STEP` positions at once.
template <unsigned TAPS, typename T>
struct Walk {
    static constexpr unsigned W = 2, STEP = 2, HALO = TAPS - 1;
    static_assert(STEP == 2, "one position at hand is what remains of a step");
    Window<TAPS, W, STEP, T> window;
    T* u;

    /// `count` of the positions from `row` on.
    struct Inputs {
        few::Stored<W, T> x[STEP];
    };
    __device__ __forceinline__ void fetch(Inputs& in, unsigned place, unsigned count) const {
#pragma unroll
        for (unsigned i = 0; i < STEP; ++i, place += window.sizes.d_inner)
            if (i < count) in.x[i] = few::fetch<W>(window.xz + (2 * place - window.c));
    }

    /// The positions at hand, of which there are `count`.
    __device__ __forceinline__ void step(unsigned place, unsigned count) {
        float v[STEP * W];
#pragma unroll
        for (unsigned i = 0; i < STEP; ++i)
#pragma unroll
            for (unsigned k = 0; k < W; ++k) {
                const float x = window.value(i, k);
                v[W * i + k] = __fmul_rn(x, gates::sigmoid(x));
            }
        const few::Rounded<T> rounded(v);
#pragma unroll
        for (unsigned i = 0; i < STEP; ++i, place += window.sizes.d_inner)
            if (i < count) rounded.template put<W>(u + place, i);
    }

    /// `own` rows of sequence `b` from position `t` on.
    __device__ __forceinline__ void rows(unsigned row, unsigned b, unsigned t, unsigned own, float* state_next) {
        const unsigned d = window.sizes.d_inner;
        unsigned place = row * d + window.c;
        Inputs in = {};
        window.enter(b, t);
        fetch(in, place, own);
#pragma unroll 1
        for (unsigned i = 0; i < own; i += STEP, place += STEP * d) {
            const unsigned count = own - i < STEP ? own - i : STEP;
#pragma unroll
            for (unsigned k = 0; k < STEP; ++k) in.x[k].widen(window.x[HALO + k]);
            fetch(in, place + STEP * d, own - i - count);
            step(place, count);
            if (count == STEP) window.move_on(STEP);
            else window.move_on(1);
        }
        if (!window.before.carried || t + own != window.sizes.seq_len) return;
#pragma unroll
        for (unsigned k = 0; k < W; ++k)
#pragma unroll
            for (unsigned j = 0; j < HALO; ++j) state_next[((size_t)b * d + window.c + k) * HALO + j] = window.x[j][k];
    }
};

/// A block of 32 x 8 threads serves 64 channels; a thread takes `run` rows, one after another. d_inner is even.
template <unsigned TAPS, typename T>
__device__ __forceinline__ void walk(const T* xz, const float* weight, const float* bias, const Before& before, T* u,
                                     float* state_next, const Sizes& sizes, unsigned run) {
    const unsigned c = (blockIdx.y * 32 + threadIdx.x) * Walk<TAPS, T>::W, first = (blockIdx.x * 8 + threadIdx.y) * run;
    if (c >= sizes.d_inner || first >= sizes.rows) return;
    const unsigned end = sizes.rows - first < run ? sizes.rows : first + run;
    Walk<TAPS, T> mine = {{xz, weight, bias, sizes, before, c}, u};
    for_sequences(first, end, sizes.seq_len,
                  [&](unsigned row, unsigned b, unsigned t, unsigned own) { mine.rows(row, b, t, own, state_next); });
}

}  // namespace conv1d

/// `flags`: 2 where sequences go on.
#define CONV1D_WALK_ENTRY(NAME, T, TAPS)                                                                               \
    extern "C" __global__ void __launch_bounds__(256, 4)                                                               \
    NAME(const T* __restrict__ xz, const float* __restrict__ weight, const float* __restrict__ bias,                   \
         const float* __restrict__ state, const unsigned* __restrict__ keep, T* __restrict__ u,                        \
         float* __restrict__ state_next, unsigned rows, unsigned seq_len, unsigned d_inner, unsigned taps,             \
         unsigned run, unsigned flags) {                                                                               \
        conv1d::walk<TAPS, T>(xz, weight, bias, {state, keep, (flags & 2) != 0}, u, state_next,                        \
                              {rows, seq_len, d_inner, taps}, run);                                                    \
    }
