// The dot products of attention's output with its gradient: src/op/attention.rs, `AttentionDelta`.
#include "contract.cuh"

// Rows whose loads a thread has under way at once.
constexpr int UNDER_WAY = 4;

// Rows of 4 · THREADS elements, one 16-byte word a thread. Lanes behind the row are +0.0, and one addition
// of +0.0 stands for the folds with them, as in src/num/lanes.rs.
template <int THREADS>
__device__ __forceinline__ void delta_words(const float* dout, const float* o, float* delta, unsigned rows) {
    const unsigned word = threadIdx.x % THREADS;
    const size_t rows_of_grid = (size_t)gridDim.x * (blockDim.x / THREADS);
    const size_t mine = (size_t)blockIdx.x * (blockDim.x / THREADS) + threadIdx.x / THREADS;
    for (size_t first = 0; first < rows; first += UNDER_WAY * rows_of_grid) {
        float4 a[UNDER_WAY], b[UNDER_WAY];
#pragma unroll
        for (int u = 0; u < UNDER_WAY; u++) {
            size_t row = first + mine + u * rows_of_grid;
            a[u] = b[u] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (row < rows) {
                a[u] = contract::load4(dout + (row * THREADS + word) * 4);
                b[u] = contract::load4(o + (row * THREADS + word) * 4);
            }
        }
#pragma unroll
        for (int u = 0; u < UNDER_WAY; u++) {
            size_t row = first + mine + u * rows_of_grid;
            // The same for all threads of the block: a warp never parts before its shuffles.
            if (first + (size_t)blockIdx.x * (blockDim.x / THREADS) + u * rows_of_grid >= rows) break;
            float x = __fadd_rn(__fmaf_rn(a[u].x, b[u].x, 0.0f), 0.0f);
            float y = __fadd_rn(__fmaf_rn(a[u].y, b[u].y, 0.0f), 0.0f);
            float z = __fadd_rn(__fmaf_rn(a[u].z, b[u].z, 0.0f), 0.0f);
            float w = __fadd_rn(__fmaf_rn(a[u].w, b[u].w, 0.0f), 0.0f);
#pragma unroll
            for (int half = THREADS / 2; half > 0; half /= 2) {
                x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, half));
                y = __fadd_rn(y, __shfl_xor_sync(0xffffffffu, y, half));
                z = __fadd_rn(z, __shfl_xor_sync(0xffffffffu, z, half));
                w = __fadd_rn(w, __shfl_xor_sync(0xffffffffu, w, half));
            }
            if (word == 0 && row < rows) delta[row] = __fadd_rn(__fadd_rn(x, z), __fadd_rn(y, w));
        }
    }
}

#define ENTRY(NAME, THREADS)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256)                                                              \
        NAME(const float* dout, const float* o, float* delta, unsigned rows, unsigned head_dim) {                  \
        delta_words<THREADS>(dout, o, delta, rows);                                                                \
    }

ENTRY(attention_delta_f32_d32, 8)
ENTRY(attention_delta_f32_d64, 16)
ENTRY(attention_delta_f32_d128, 32)

// Rows of any number of elements at any address, a warp each.
extern "C" __global__ void __launch_bounds__(256)
    attention_delta_f32_any(const float* dout, const float* o, float* delta, unsigned rows, unsigned head_dim) {
    const size_t warps = (size_t)gridDim.x * (blockDim.x / 32);
    for (size_t row = (size_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; row < rows; row += warps) {
        float sum = contract::row_dot<false>(dout + row * head_dim, o + row * head_dim, head_dim);
        if (threadIdx.x % 32 == 0) delta[row] = sum;
    }
}
