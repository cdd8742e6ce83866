// target = -0.0, the number that changes no other when it is added (src/op/copy.rs).

#define THREADS 256
#define VECTORS 4
#define BLOCK (THREADS * VECTORS * 4)
#define NEUTRAL 0x80000000u

// `n_low` and `n_high` are the two words of the number of elements. The grid has one block for every
// BLOCK elements.
extern "C" __global__ void __launch_bounds__(THREADS) fill_neutral_f32(
    unsigned* __restrict__ target, unsigned n_low, unsigned n_high)
{
    const unsigned long long n = (unsigned long long)n_high << 32 | n_low;
    const unsigned long long start = (unsigned long long)blockIdx.x * BLOCK;
    if (((unsigned long long)target & 15) == 0 && start + BLOCK <= n) {
        uint4* to = (uint4*)(target + start) + threadIdx.x;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            to[i * THREADS] = make_uint4(NEUTRAL, NEUTRAL, NEUTRAL, NEUTRAL);
        }
        return;
    }
    const unsigned long long end = start + BLOCK < n ? start + BLOCK : n;
    for (unsigned long long i = start + threadIdx.x; i < end; i += THREADS) {
        target[i] = NEUTRAL;
    }
}
