// dx[t, i] (+)= sum_k ds[t, k] * a[k, i], one chain of tf32 steps over ascending k.
#include "lora_tensor.cuh"

#define DOWN_GRAD(NAME, TILE, VECTORS)                                                                           \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS, 3)                                               \
        lora_down_grad_input_tf32##NAME(const float* __restrict__ ds, const float* __restrict__ a,   \
                     float* dx, unsigned rows, unsigned n_in, unsigned ranks, unsigned add) {                      \
        lora_down_grad_tile<TILE, VECTORS>(ds, a, dx, rows, n_in, ranks, add != 0);                              \
    }

using Tile64x64 = TensorTile<Tf32, 64, 64, 2, 2, 2, Inner::K, Inner::OUTER, true>;
using Tile64x64Any = TensorTile<Tf32, 64, 64, 2, 2, 2, Inner::K, Inner::OUTER, false>;

DOWN_GRAD(, Tile64x64, true)
DOWN_GRAD(_any, Tile64x64Any, false)
