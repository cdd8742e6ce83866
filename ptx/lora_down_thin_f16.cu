// s[t, k] = sum_i x[t, i] * a[k, i], one chain of f16 steps over ascending i, where every row is whole chunks of 16 bytes.
#include "lora_thin.cuh"

#define DOWN(RANKS)                                                                                              \
    extern "C" __global__ void __launch_bounds__(4 * RANKS) lora_down_thin_f16_##RANKS(                          \
        const unsigned short* __restrict__ x, const unsigned short* __restrict__ a, unsigned short* __restrict__ s, \
        unsigned rows, unsigned n_in, unsigned ranks) {                                                          \
        thin_down_tile<ThinRows<F16, RANKS, Inner::K, 7>>(x, a, s, rows, n_in, ranks);                          \
    }

DOWN(16)
DOWN(32)
DOWN(48)
