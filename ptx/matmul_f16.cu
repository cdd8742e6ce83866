// y[t, o] = sum_i x[t, i] * weight[o, i], one chain of f16 steps over ascending i, then + bias[o] once.
#include "gemm_tensor.cuh"

#define FORWARD(NAME, TILE, BLOCKS)                                                                               \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS, BLOCKS)                                           \
        matmul_f16_##NAME(const unsigned short* __restrict__ x, const unsigned short* __restrict__ weight,        \
                     const float* __restrict__ bias, unsigned short* __restrict__ y, unsigned rows,               \
                     unsigned n_in, unsigned n_out, unsigned has_bias) {                                          \
        tensor_product_tile<TILE>(TensorProduct{x, weight, rows, n_out, n_in}, y, has_bias ? bias : nullptr,        \
                                  blockIdx.x);                                                                    \
    }

using Tile128x128 = TensorTile<F16, 128, 128, 2, 4, 3, Inner::K, Inner::K, true>;
using Tile64x64 = TensorTile<F16, 64, 64, 2, 2, 4, Inner::K, Inner::K, true>;
using Tile32x32 = TensorTile<F16, 32, 32, 2, 2, 4, Inner::K, Inner::K, true>;
using Tile128x128Any = TensorTile<F16, 128, 128, 2, 4, 3, Inner::K, Inner::K, false>;
using Tile32x32Any = TensorTile<F16, 32, 32, 2, 2, 4, Inner::K, Inner::K, false>;

FORWARD(128x128, Tile128x128, 2)
FORWARD(64x64, Tile64x64, 3)
FORWARD(32x32, Tile32x32, 4)
FORWARD(128x128_any, Tile128x128Any, 1)
FORWARD(32x32_any, Tile32x32Any, 2)
