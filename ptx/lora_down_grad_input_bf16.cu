// dx[t, i] (+)= sum_k ds[t, k] * a[k, i], one chain of bf16 steps over ascending k.
#include "lora_tensor.cuh"
#include "lora_wide.cuh"

#define DOWN_GRAD(NAME, TILE, VECTORS)                                                                           \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS, 4)                                               \
        lora_down_grad_input_bf16##NAME(const unsigned short* __restrict__ ds, const unsigned short* __restrict__ a,   \
                     unsigned short* dx, unsigned rows, unsigned n_in, unsigned ranks, unsigned add) {                      \
        lora_down_grad_tile<TILE, VECTORS>(ds, a, dx, rows, n_in, ranks, add != 0);                              \
    }

using Tile64x64 = TensorTile<Bf16, 64, 64, 2, 2, 2, Inner::K, Inner::OUTER, true>;
using Tile64x64Any = TensorTile<Bf16, 64, 64, 2, 2, 2, Inner::K, Inner::OUTER, false>;

DOWN_GRAD(, Tile64x64, true)
DOWN_GRAD(_any, Tile64x64Any, false)

// In place by warps down strips of 64 columns, for up to 16, 32 and 48 ranks.
DOWN_GRAD_WIDE(bf16, Bf16)
