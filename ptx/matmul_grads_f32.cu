// Both gradients of a small linear layer, which both read dy: the first blocks compute tiles of dx, as
// matmul_grad_input_f32.cu has them, the others pieces of tiles of dweight, as matmul_grad_weight_f32.cu has them.
#include "weight_f32.cuh"

#define GRADS(NAME, INPUT, WEIGHT)                                                                                \
    extern "C" __global__ void __launch_bounds__(128, 4) matmul_grads_f32_##NAME(                                 \
        const float* __restrict__ dy, const float* __restrict__ x, float* dweight, unsigned* arrivals,            \
        float4* partials, unsigned n_in, unsigned n_out, unsigned tokens, unsigned grain, unsigned piece,         \
        unsigned pieces_of_grain, unsigned pieces, unsigned add, const float* __restrict__ weight,                \
        float* __restrict__ dx, unsigned input_blocks) {                                                          \
        static_assert(INPUT::THREADS == 128 && WEIGHT::THREADS == 128, "blocks of both kinds are alike");         \
        if (blockIdx.x < input_blocks) {                                                                          \
            const Product p{dy, weight, tokens, n_in, n_out};                                                     \
            product_tile<InSharedOfLaunch<INPUT>>(p, dx, nullptr, blockIdx.x);                                    \
        } else {                                                                                                  \
            weight_tile<InSharedOfLaunch<WEIGHT>>(dy, x, dweight, arrivals, partials, n_in, n_out,                \
                                                  Cut{tokens, grain, piece, pieces_of_grain, pieces}, add,        \
                                                  blockIdx.x - input_blocks);                                     \
        }                                                                                                         \
    }

using Input64x32 = Small<64, 32, 32, 3, 4, 4, Inner::K, Inner::OUTER, true>;
using Input32x32 = Small<32, 32, 32, 5, 2, 4, Inner::K, Inner::OUTER, true>;
using Weight64x32 = Small<64, 32, 32, 3, 4, 4, Inner::OUTER, Inner::OUTER, true>;
using Weight32x32 = Small<32, 32, 32, 5, 2, 4, Inner::OUTER, Inner::OUTER, true>;

GRADS(64x32_64x32, Input64x32, Weight64x32)
GRADS(64x32_32x32, Input64x32, Weight32x32)
GRADS(32x32_64x32, Input32x32, Weight64x32)
GRADS(32x32_32x32, Input32x32, Weight32x32)
