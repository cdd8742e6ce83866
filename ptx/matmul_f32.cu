// y[t, o] = sum_i x[t, i] * weight[o, i], one fma chain over ascending i, then + bias[o] once.
#include "gemm_f32.cuh"

#define FORWARD(NAME, TILE, BLOCKS)                                                                               \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS, BLOCKS)                                           \
        matmul_f32_##NAME(const float* __restrict__ x, const float* __restrict__ weight,                          \
                          const float* __restrict__ bias, float* __restrict__ y, unsigned rows, unsigned n_in,    \
                          unsigned n_out, unsigned has_bias) {                                                    \
        product_tile<TILE>(Product{x, weight, rows, n_out, n_in}, y, has_bias ? bias : nullptr, blockIdx.x);      \
    }

using Tile128x128 = Large<128, 128, 32, 8, 8, Inner::K, Inner::K, true>;
using Tile128x64 = Large<128, 64, 32, 8, 8, Inner::K, Inner::K, true>;
using Tile64x32 = Small<64, 32, 32, 3, 4, 4, Inner::K, Inner::K, true>;
using Tile32x32 = Small<32, 32, 32, 5, 2, 4, Inner::K, Inner::K, true>;
using Tile128x128Any = Large<128, 128, 8, 8, 8, Inner::K, Inner::K, false>;
using Tile32x32Any = Small<32, 32, 32, 5, 2, 4, Inner::K, Inner::K, false>;

FORWARD(128x128, Tile128x128, 2)
FORWARD(128x64, Tile128x64, 3)
FORWARD(64x32, Tile64x32, 4)
FORWARD(32x32, Tile32x32, 4)
FORWARD(128x128_any, Tile128x128Any, 1)
FORWARD(32x32_any, Tile32x32Any, 4)
