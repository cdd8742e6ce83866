// left = left + right, elementwise (src/op/tree_add.rs).

#define THREADS 256
// Elements of one block: every thread has four 16-byte loads of each side in flight.
#define VECTORS 4
#define BLOCK (THREADS * VECTORS * 4)

// `n_low` and `n_high` are the two words of the number of elements. The grid has one block for every
// BLOCK elements.
extern "C" __global__ void __launch_bounds__(THREADS) tree_add_f32(
    const float* __restrict__ right, float* __restrict__ left, unsigned n_low, unsigned n_high)
{
    const unsigned long long n = (unsigned long long)n_high << 32 | n_low;
    const unsigned long long start = (unsigned long long)blockIdx.x * BLOCK;
    const bool aligned = (((unsigned long long)right | (unsigned long long)left) & 15) == 0;
    if (aligned && start + BLOCK <= n) {
        const float4* a = (const float4*)(right + start) + threadIdx.x;
        float4* b = (float4*)(left + start) + threadIdx.x;
        float4 x[VECTORS], y[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            x[i] = a[i * THREADS];
            y[i] = b[i * THREADS];
        }
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            y[i].x = __fadd_rn(y[i].x, x[i].x);
            y[i].y = __fadd_rn(y[i].y, x[i].y);
            y[i].z = __fadd_rn(y[i].z, x[i].z);
            y[i].w = __fadd_rn(y[i].w, x[i].w);
            b[i * THREADS] = y[i];
        }
        return;
    }
    const unsigned long long end = start + BLOCK < n ? start + BLOCK : n;
#pragma unroll 4
    for (unsigned long long i = start + threadIdx.x; i < end; i += THREADS) {
        left[i] = __fadd_rn(left[i], right[i]);
    }
}
