// partials[b]: the sum of squares of block b of the gradients in binary64 (src/op/clip.rs). One thread a lane, so 4-byte
// loads; 64 of them are in flight a thread, and the lane's chain follows in order.
#pragma once

namespace grad_squares {

constexpr int LANES = 256;
// SQUARES_BLOCK of src/op/clip.rs.
constexpr int BLOCK = 16384;
constexpr int TERMS = BLOCK / LANES;

__device__ __forceinline__ double square_onto(float x, double acc)
{
    const double wide = (double)x;
    return __fma_rn(wide, wide, acc);
}

// Block `index` of the n gradients, by LANES threads.
__device__ __forceinline__ void sum_block(const float* grad, unsigned long long n, unsigned index, double* partials)
{
    __shared__ double lanes[LANES];
    const unsigned long long start = (unsigned long long)index * BLOCK;
    const unsigned t = threadIdx.x;
    const float* block = grad + start + t;
    double acc = 0.0;
    if (start + BLOCK <= n) {
        float x[TERMS];
#pragma unroll
        for (int i = 0; i < TERMS; i++) {
            x[i] = block[i * LANES];
        }
#pragma unroll
        for (int i = 0; i < TERMS; i++) {
            acc = square_onto(x[i], acc);
        }
    } else {
        const unsigned rest = (unsigned)(n - start);
#pragma unroll 8
        for (unsigned i = t; i < rest; i += LANES) {
            acc = square_onto(grad[start + i], acc);
        }
    }
    lanes[t] = acc;
    __syncthreads();
    if (t < 32) {
        double a[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            a[j] = lanes[t + 32 * j];
        }
#pragma unroll
        for (int half = 4; half > 0; half /= 2) {
#pragma unroll
            for (int j = 0; j < half; j++) {
                a[j] = __dadd_rn(a[j], a[j + half]);
            }
        }
#pragma unroll
        for (int half = 16; half > 0; half /= 2) {
            a[0] = __dadd_rn(a[0], __shfl_down_sync(0xffffffffu, a[0], half));
        }
        if (t == 0) {
            partials[index] = a[0];
        }
    }
}

}  // namespace grad_squares
