// dx[t, i] = sum_o dy[t, o] * weight[o, i], one fma chain over ascending o.
#include "gemm_f32.cuh"

#define GRAD_INPUT(NAME, TILE, BLOCKS)                                                                            \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS, BLOCKS)                                           \
        matmul_grad_input_f32_##NAME(const float* __restrict__ dy, const float* __restrict__ weight,              \
                                     float* __restrict__ dx, unsigned rows, unsigned n_in, unsigned n_out) {      \
        product_tile<TILE>(Product{dy, weight, rows, n_in, n_out}, dx, nullptr, blockIdx.x);                      \
    }

using Tile128x128 = Large<128, 128, 32, 8, 8, Inner::K, Inner::OUTER, true>;
using Tile128x64 = Large<128, 64, 32, 8, 8, Inner::K, Inner::OUTER, true>;
using Tile64x32 = Small<64, 32, 32, 3, 4, 4, Inner::K, Inner::OUTER, true>;
using Tile32x32 = Small<32, 32, 32, 5, 2, 4, Inner::K, Inner::OUTER, true>;
using Tile128x128Any = Large<128, 128, 8, 8, 8, Inner::K, Inner::OUTER, false>;
using Tile32x32Any = Small<32, 32, 32, 5, 2, 4, Inner::K, Inner::OUTER, false>;

GRAD_INPUT(128x128, Tile128x128, 2)
GRAD_INPUT(128x64, Tile128x64, 3)
GRAD_INPUT(64x32, Tile64x32, 4)
GRAD_INPUT(32x32, Tile32x32, 4)
GRAD_INPUT(128x128_any, Tile128x128Any, 2)
GRAD_INPUT(32x32_any, Tile32x32Any, 4)
