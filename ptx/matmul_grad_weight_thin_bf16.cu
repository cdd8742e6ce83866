// dweight[o, i] (+)= sum_t dy[t, o] * x[t, i] with few rows, as in matmul_grad_weight_bf16.cu, where all pieces are one tree
// and every row is whole chunks of 16 bytes.
#include "thin_sum.cuh"

#define GRAD_WEIGHT(ROWS)                                                                                        \
    extern "C" __global__ void __launch_bounds__(128, 3) matmul_grad_weight_thin_bf16_##ROWS(                     \
        const unsigned short* __restrict__ dy, const unsigned short* __restrict__ x, float* dweight,             \
        unsigned* arrivals, float4* partials, unsigned n_in, unsigned n_out, unsigned tokens, unsigned grain,    \
        unsigned piece, unsigned pieces_of_grain, unsigned pieces, unsigned add) {                               \
        thin_weight_tile<ThinSum<Bf16, ROWS, 64>>(dy, x, dweight, arrivals, partials, n_in, n_out,               \
                                                  Cut{tokens, grain, piece, pieces_of_grain, pieces}, add != 0); \
    }

GRAD_WEIGHT(16)
GRAD_WEIGHT(32)
GRAD_WEIGHT(48)
