// partials[b]: the sum of squares of block b in binary64 (src/op/clip.rs). One thread a lane, so 4-byte
// loads; 64 of them are in flight a thread, and the lane's chain follows in order.

#define LANES 256
// SQUARES_BLOCK of src/op/clip.rs.
#define BLOCK 16384
#define TERMS (BLOCK / LANES)

__device__ __forceinline__ double square_onto(float x, double acc)
{
    const double wide = (double)x;
    return __fma_rn(wide, wide, acc);
}

// The grid has one block for every BLOCK elements.
extern "C" __global__ void __launch_bounds__(LANES, 2) grad_squares_f32(
    const float* __restrict__ grad, double* __restrict__ partials, unsigned n_low, unsigned n_high)
{
    __shared__ double lanes[LANES];
    const unsigned long long n = (unsigned long long)n_high << 32 | n_low;
    const unsigned long long start = (unsigned long long)blockIdx.x * BLOCK;
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
    if (t >= 32) {
        return;
    }
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
        partials[blockIdx.x] = a[0];
    }
}
