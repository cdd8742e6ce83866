// db[row + o, k] = (sum_t dy[t, first + o] * s[t, part * rank + k]) * scale: a chain of tf32 steps over ascending tokens
// within a piece, pieces and grains folded by the balanced tree, for up to four parts.
#include "lora_tensor.cuh"

#define UP_GRAD_WEIGHT(NAME, TILE)                                                                               \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS, 3)                                               \
        lora_up_grad_weight_tf32##NAME(const float* __restrict__ dy, const float* __restrict__ s,    \
                     float* __restrict__ db, unsigned* arrivals, float4* partials, unsigned tokens,              \
                     unsigned grain, unsigned piece, unsigned pieces_of_grain, unsigned pieces, unsigned rank,   \
                     unsigned ranks, unsigned n_out, float scale, PARTS_PARAMETERS) {                            \
        lora_up_grad_weight_tile<TILE>(dy, s, db, arrivals, partials, Ranks{rank, ranks, n_out}, scale,          \
                                       Cut{tokens, grain, piece, pieces_of_grain, pieces}, PARTS_GIVEN);         \
    }

using Tile64x32 = TensorTile<Tf32, 64, 32, 4, 1, 3, Inner::OUTER, Inner::OUTER, true>;
using Tile64x32Any = TensorTile<Tf32, 64, 32, 4, 1, 3, Inner::OUTER, Inner::OUTER, false>;

UP_GRAD_WEIGHT(, Tile64x32)
UP_GRAD_WEIGHT(_any, Tile64x32Any)
