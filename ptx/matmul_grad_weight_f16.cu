// dweight[o, i] (+)= sum_t dy[t, o] * x[t, i]: a chain of f16 steps over ascending tokens within a piece, pieces
// and grains folded by the balanced tree, as in matmul_grad_weight_f32.cu.
#include "gemm_tensor.cuh"

#define GRAD_WEIGHT(NAME, TILE, BLOCKS)                                                                           \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS, BLOCKS) matmul_grad_weight_f16_##NAME(            \
        const unsigned short* __restrict__ dy, const unsigned short* __restrict__ x, float* dweight,              \
        unsigned* arrivals, float4* partials, unsigned n_in, unsigned n_out, unsigned tokens, unsigned grain,     \
        unsigned piece, unsigned pieces_of_grain, unsigned pieces, unsigned add) {                                \
        tensor_weight_tile<TILE>(dy, x, dweight, arrivals, partials, n_in, n_out,                                 \
                                 Cut{tokens, grain, piece, pieces_of_grain, pieces}, add);                        \
    }

using Tile128x128 = TensorTile<F16, 128, 128, 2, 4, 3, Inner::OUTER, Inner::OUTER, true>;
using Tile64x64 = TensorTile<F16, 64, 64, 2, 2, 4, Inner::OUTER, Inner::OUTER, true>;
using Tile32x32 = TensorTile<F16, 32, 32, 2, 2, 4, Inner::OUTER, Inner::OUTER, true>;
using Tile128x128Any = TensorTile<F16, 128, 128, 2, 4, 3, Inner::OUTER, Inner::OUTER, false>;
using Tile32x32Any = TensorTile<F16, 32, 32, 2, 2, 4, Inner::OUTER, Inner::OUTER, false>;

GRAD_WEIGHT(128x128, Tile128x128, 2)
GRAD_WEIGHT(64x64, Tile64x64, 3)
GRAD_WEIGHT(32x32, Tile32x32, 4)
GRAD_WEIGHT(128x128_any, Tile128x128Any, 1)
GRAD_WEIGHT(32x32_any, Tile32x32Any, 2)

using Whole32x32 = TensorTile<F16, 32, 32, 1, 1, 3, Inner::OUTER, Inner::OUTER, true>;

extern "C" __global__ void __launch_bounds__(256, 1) matmul_grad_weight_f16_whole_32x32(
    const unsigned short* __restrict__ dy, const unsigned short* __restrict__ x, float* dweight, unsigned n_in, unsigned n_out,
    unsigned tokens, unsigned grain, unsigned piece, unsigned pieces_of_grain, unsigned pieces, unsigned add) {
    const Cut cut{tokens, grain, piece, pieces_of_grain, pieces};
    tensor_whole_tile<Whole32x32, 1>(dy, x, dweight, n_in, n_out, cut, add, blockIdx.x);
}
