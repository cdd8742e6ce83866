// Both gradients of a small linear layer: the first blocks compute tiles of dweight, as matmul_grad_weight_tf32.cu has
// them, the others tiles of dx, as matmul_grad_input_tf32.cu has them. All of them read dy.
#include "gemm_tensor.cuh"

using Whole32x32 = TensorTile<Tf32, 32, 32, 1, 1, 3, Inner::OUTER, Inner::OUTER, true>;
using Input64x64 = TensorTile<Tf32, 64, 64, 2, 2, 4, Inner::K, Inner::OUTER, true>;
using Input32x32 = TensorTile<Tf32, 32, 32, 2, 2, 4, Inner::K, Inner::OUTER, true>;

#define GRADS(NAME, TILE)                                                                                         \
    extern "C" __global__ void __launch_bounds__(128, 2) matmul_grads_tf32_##NAME(                                \
        const float* __restrict__ dy, const float* __restrict__ x, float* dweight, unsigned n_in, unsigned n_out, \
        unsigned tokens, unsigned grain, unsigned piece, unsigned pieces_of_grain, unsigned pieces, unsigned add, \
        const float* __restrict__ weight, float* __restrict__ dx, unsigned weight_blocks) {                       \
        static_assert(TILE::THREADS == 128, "blocks of both kinds are alike");                                    \
        const Cut cut{tokens, grain, piece, pieces_of_grain, pieces};                                             \
        if (blockIdx.x < weight_blocks) {                                                                         \
            tensor_whole_tile<Whole32x32, 2>(dy, x, dweight, n_in, n_out, cut, add, blockIdx.x);                  \
        } else {                                                                                                  \
            const TensorProduct p{dy, weight, tokens, n_in, n_out};                                               \
            tensor_product_tile<TILE>(p, dx, nullptr, blockIdx.x - weight_blocks);                                \
        }                                                                                                         \
    }

GRADS(64x64, Input64x64)
GRADS(32x32, Input32x32)
