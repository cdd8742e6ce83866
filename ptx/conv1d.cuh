// The causal depthwise convolution with its bias and SiLU: what both directions share, and forward.
#pragma once
#include "contract.cuh"
#include "quads.cuh"

namespace conv1d {

using quads::Quad;

/// The sizes of a convolution; `taps` is d_conv.
struct Sizes {
    unsigned rows, seq_len, d_inner, taps;
};

/// What comes before a sequence's first position.
struct Before {
    const float* state;
    const unsigned* keep;
    bool carried;

    /// Number `i` of the d_conv - 1 inputs before sequence `b`, oldest first, of channel `c`.
    __device__ __forceinline__ float input(const Sizes& sizes, unsigned b, unsigned c, unsigned i) const {
        if (!carried || keep[b] == 0) return 0.0f;
        return state[((size_t)b * sizes.d_inner + c) * (sizes.taps - 1) + i];
    }
};

/// What tap `j` reads for four channels from `c` on: position `t` of sequence `b`, which is row `row`.
template <typename T>
__device__ __forceinline__ Quad tap(const T* xz, const Sizes& sizes, const Before& before, unsigned row, unsigned c,
                                    unsigned there, unsigned j, bool whole) {
    const unsigned t = row % sizes.seq_len, b = row / sizes.seq_len, back = sizes.taps - 1 - j;
    if (t >= back) return quads::widen<T>(quads::fetch(xz + (size_t)(row - back) * 2 * sizes.d_inner + c, there, whole));
    Quad x;
#pragma unroll
    for (unsigned k = 0; k < 4; ++k) x.v[k] = k < there ? before.input(sizes, b, c + k, t + j) : 0.0f;
    return x;
}

/// Forward for any number of taps: a block of 32 x 8 threads serves 32 quads of channels; a thread takes `run` rows, one after another, and
/// reads each input once a tap.
template <typename T>
__device__ __forceinline__ void forward(const T* __restrict__ xz, const float* __restrict__ weight, const float* __restrict__ bias,
                                        const Before& before, T* __restrict__ u, float* __restrict__ state_next,
                                        const Sizes& sizes, unsigned run, bool whole) {
    const unsigned c = (blockIdx.y * 32 + threadIdx.x) * 4, d = sizes.d_inner, taps = sizes.taps;
    if (c >= d) return;
    const unsigned there = d - c < 4 ? d - c : 4;
    const unsigned first = (blockIdx.x * 8 + threadIdx.y) * run;
    const unsigned end = sizes.rows - first < run ? sizes.rows : first + run;
    if (first >= sizes.rows) return;
    for (unsigned row = first; row < end; ++row) {
        const unsigned t = row % sizes.seq_len;
        Quad v = {};
        for (unsigned j = 0; j < taps; ++j) {
            const Quad in = tap(xz, sizes, before, row, c, there, j, whole);
#pragma unroll
            for (unsigned k = 0; k < 4; ++k)
                if (k < there) v.v[k] = __fmaf_rn(weight[(size_t)(c + k) * taps + j], in.v[k], v.v[k]);
        }
#pragma unroll
        for (unsigned k = 0; k < 4; ++k) {
            v.v[k] = __fadd_rn(v.v[k], k < there ? bias[c + k] : 0.0f);
            v.v[k] = __fmul_rn(v.v[k], contract::sigmoid(v.v[k]));
        }
        quads::put(u + (size_t)row * d + c, v, there, whole);
        if (before.carried && t + 1 == sizes.seq_len) {
            const unsigned b = row / sizes.seq_len;
            for (unsigned j = 1; j < taps; ++j) {
                const Quad in = tap(xz, sizes, before, row, c, there, j, whole);
#pragma unroll
                for (unsigned k = 0; k < 4; ++k)
                    if (k < there) state_next[((size_t)b * d + c + k) * (taps - 1) + j - 1] = in.v[k];
            }
        }
    }
}

}  // namespace conv1d

/// `flags`: 1 for whole quads, 2 where sequences go on.
#define CONV1D_ENTRY(NAME, T)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
    NAME(const T* __restrict__ xz, const float* __restrict__ weight, const float* __restrict__ bias,                   \
         const float* __restrict__ state, const unsigned* __restrict__ keep, T* __restrict__ u,                        \
         float* __restrict__ state_next, unsigned rows, unsigned seq_len, unsigned d_inner, unsigned taps,             \
         unsigned run, unsigned flags) {                                                                               \
        conv1d::forward<T>(xz, weight, bias, {state, keep, (flags & 2) != 0}, u, state_next,                           \
                           {rows, seq_len, d_inner, taps}, run, (flags & 1) != 0);                                     \
    }
