// dx[t, i] = sum_o dy[t, o] * weight[o, i], one chain of tf32 steps over ascending o.
#include "gemm_tensor.cuh"

#define GRAD_INPUT(NAME, TILE, BLOCKS)                                                                            \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS, BLOCKS)                                           \
        matmul_grad_input_tf32_##NAME(const float* __restrict__ dy, const float* __restrict__ weight,             \
                                float* __restrict__ dx, unsigned rows, unsigned n_in, unsigned n_out) {           \
        tensor_product_tile<TILE>(TensorProduct{dy, weight, rows, n_in, n_out}, dx, nullptr, blockIdx.x);         \
    }

using Tile128x128 = TensorTile<Tf32, 128, 128, 2, 4, 3, Inner::K, Inner::OUTER, true>;
using Tile64x64 = TensorTile<Tf32, 64, 64, 2, 2, 4, Inner::K, Inner::OUTER, true>;
using Tile32x32 = TensorTile<Tf32, 32, 32, 2, 2, 4, Inner::K, Inner::OUTER, true>;
using Tile128x128Any = TensorTile<Tf32, 128, 128, 2, 4, 3, Inner::K, Inner::OUTER, false>;
using Tile32x32Any = TensorTile<Tf32, 32, 32, 2, 2, 4, Inner::K, Inner::OUTER, false>;

GRAD_INPUT(128x128, Tile128x128, 2)
GRAD_INPUT(64x64, Tile64x64, 3)
GRAD_INPUT(32x32, Tile32x32, 4)
GRAD_INPUT(128x128_any, Tile128x128Any, 1)
GRAD_INPUT(32x32_any, Tile32x32Any, 2)
