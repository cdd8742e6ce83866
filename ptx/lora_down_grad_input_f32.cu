// dx[t, i] (+)= sum_k ds[t, k] * a[k, i], one fma chain over ascending k.
#include "lora_f32.cuh"

#define DOWN_GRAD(NAME, TILE)                                                                                    \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS, 4)                                               \
        lora_down_grad_input_f32##NAME(const float* __restrict__ ds, const float* __restrict__ a, float* dx,     \
                     unsigned rows, unsigned n_in, unsigned ranks, unsigned add) {                               \
        lora_down_grad_tile<TILE>(ds, a, dx, rows, n_in, ranks, add != 0);                                       \
    }

using Tile64x32 = Small<64, 32, 32, 3, 4, 4, Inner::K, Inner::OUTER, true>;
using Tile64x32Any = Small<64, 32, 32, 3, 4, 4, Inner::K, Inner::OUTER, false>;

DOWN_GRAD(, Tile64x32)
DOWN_GRAD(_any, Tile64x32Any)
