// The dot products of attention's output with its gradient, both stored in H: src/op/attention.rs, `AttentionDelta`.
#pragma once
#include "contract.cuh"
#include "narrow.cuh"

namespace attention_delta {

/// Rows whose loads a thread has under way at once.
constexpr int UNDER_WAY = 4;

/// Rows of 8 * THREADS elements, one 16-byte word a thread. Lanes behind the row are +0.0, and one addition of +0.0
/// stands for the folds with them, as in src/num/lanes.rs.
template <int THREADS, typename H>
__device__ __forceinline__ void words(const H* dout, const H* o, float* delta, unsigned rows) {
    const unsigned word = threadIdx.x % THREADS;
    const size_t rows_of_block = blockDim.x / THREADS, rows_of_grid = gridDim.x * rows_of_block;
    const size_t mine = blockIdx.x * rows_of_block + threadIdx.x / THREADS;
    for (size_t first = 0; first < rows; first += UNDER_WAY * rows_of_grid) {
        uint4 a[UNDER_WAY], b[UNDER_WAY];
#pragma unroll
        for (int u = 0; u < UNDER_WAY; u++) {
            const size_t row = first + mine + u * rows_of_grid;
            a[u] = b[u] = make_uint4(0, 0, 0, 0);
            if (row < rows) {
                a[u] = *reinterpret_cast<const uint4*>(dout + (row * THREADS + word) * 8);
                b[u] = *reinterpret_cast<const uint4*>(o + (row * THREADS + word) * 8);
            }
        }
#pragma unroll
        for (int u = 0; u < UNDER_WAY; u++) {
            const size_t row = first + mine + u * rows_of_grid;
            // The same for all threads of the block: a warp never parts before its shuffles.
            if (first + blockIdx.x * rows_of_block + u * rows_of_grid >= rows) break;
            const narrow::Octet x = narrow::widen8<H>(a[u]), y = narrow::widen8<H>(b[u]);
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = __fadd_rn(__fmaf_rn(x.v[i], y.v[i], 0.0f), 0.0f);
#pragma unroll
            for (int half = THREADS / 2; half > 0; half /= 2) {
#pragma unroll
                for (int i = 0; i < 8; i++) v[i] = __fadd_rn(v[i], __shfl_xor_sync(contract::WHOLE_WARP, v[i], half));
            }
            const float even = __fadd_rn(__fadd_rn(v[0], v[4]), __fadd_rn(v[2], v[6]));
            const float odd = __fadd_rn(__fadd_rn(v[1], v[5]), __fadd_rn(v[3], v[7]));
            if (word == 0 && row < rows) delta[row] = __fadd_rn(even, odd);
        }
    }
}

/// Rows of any number of elements at any address, a warp each.
template <typename H>
__device__ __forceinline__ void any(const H* dout, const H* o, float* delta, unsigned rows, unsigned head_dim) {
    const size_t warps = (size_t)gridDim.x * (blockDim.x / 32);
    for (size_t row = (size_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; row < rows; row += warps) {
        const H *a = dout + row * head_dim, *b = o + row * head_dim;
        float lanes[8] = {};
        contract::for_strided(head_dim, [&](unsigned i, int lane) {
            lanes[lane] = __fmaf_rn(narrow::widen(a[i]), narrow::widen(b[i]), lanes[lane]);
        });
        const float sum = contract::fold_strided(lanes);
        if (threadIdx.x % 32 == 0) delta[row] = sum;
    }
}

}  // namespace attention_delta

#define ATTENTION_DELTA_ENTRY(NAME, H, ...)                                                                   \
    extern "C" __global__ void __launch_bounds__(256)                                                         \
    NAME(const narrow::H* dout, const narrow::H* o, float* delta, unsigned rows, unsigned head_dim) {         \
        attention_delta::__VA_ARGS__;                                                                         \
    }

#define ATTENTION_DELTA_ENTRIES(H)                                                                            \
    ATTENTION_DELTA_ENTRY(attention_delta_##H##_d32, H, words<4>(dout, o, delta, rows))                       \
    ATTENTION_DELTA_ENTRY(attention_delta_##H##_d64, H, words<8>(dout, o, delta, rows))                       \
    ATTENTION_DELTA_ENTRY(attention_delta_##H##_d128, H, words<16>(dout, o, delta, rows))                     \
    ATTENTION_DELTA_ENTRY(attention_delta_##H##_any, H, any(dout, o, delta, rows, head_dim))
