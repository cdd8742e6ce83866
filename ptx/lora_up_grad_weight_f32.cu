// db[row + o, k] = (sum_t dy[t, first + o] * s[t, part * rank + k]) * scale: an fma chain over ascending tokens within a
// piece, pieces and grains folded by the balanced tree, for up to four parts.
#include "lora_f32.cuh"

#define UP_GRAD_WEIGHT(NAME, TILE)                                                                               \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS, 4)                                               \
        lora_up_grad_weight_f32##NAME(const float* __restrict__ dy, const float* __restrict__ s,                 \
                     float* __restrict__ db, unsigned* arrivals, float* partials, unsigned tokens,               \
                     unsigned grain, unsigned piece, unsigned pieces_of_grain, unsigned pieces, unsigned rank,   \
                     unsigned ranks, unsigned n_out, float scale, PARTS_PARAMETERS) {                            \
        lora_up_grad_weight_tile<TILE>(dy, s, db, arrivals, partials, Ranks{rank, ranks, n_out}, scale,          \
                                       Cut{tokens, grain, piece, pieces_of_grain, pieces}, PARTS_GIVEN);         \
    }

using Tile64x32 = Small<64, 32, 32, 3, 4, 4, Inner::OUTER, Inner::OUTER, true>;
using Tile64x32Any = Small<64, 32, 32, 3, 4, 4, Inner::OUTER, Inner::OUTER, false>;

UP_GRAD_WEIGHT(, Tile64x32)
UP_GRAD_WEIGHT(_any, Tile64x32Any)
