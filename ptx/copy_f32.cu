// target = source, bit for bit (src/op/copy.rs).

#define THREADS 256
// Elements of one block: every thread has four 16-byte loads in flight.
#define VECTORS 4
#define BLOCK (THREADS * VECTORS * 4)

// `n_low` and `n_high` are the two words of the number of elements. The grid has one block for every
// BLOCK elements.
extern "C" __global__ void __launch_bounds__(THREADS) copy_f32(
    const unsigned* __restrict__ source, unsigned* __restrict__ target, unsigned n_low, unsigned n_high)
{
    const unsigned long long n = (unsigned long long)n_high << 32 | n_low;
    const unsigned long long start = (unsigned long long)blockIdx.x * BLOCK;
    const bool aligned = (((unsigned long long)source | (unsigned long long)target) & 15) == 0;
    if (aligned && start + BLOCK <= n) {
        const uint4* from = (const uint4*)(source + start) + threadIdx.x;
        uint4* to = (uint4*)(target + start) + threadIdx.x;
        uint4 x[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            x[i] = from[i * THREADS];
        }
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            to[i * THREADS] = x[i];
        }
        return;
    }
    const unsigned long long end = start + BLOCK < n ? start + BLOCK : n;
#pragma unroll 4
    for (unsigned long long i = start + threadIdx.x; i < end; i += THREADS) {
        target[i] = source[i];
    }
}
