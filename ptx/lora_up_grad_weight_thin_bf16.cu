// db[row + o, k] = (sum_t dy[t, first + o] * s[t, part * rank + k]) * scale, as in lora_up_grad_weight_bf16.cu, where all pieces
// are one tree and every row is whole chunks of 16 bytes.
#include "lora_thin.cuh"

#define UP_GRAD_WEIGHT(RANKS)                                                                                    \
    extern "C" __global__ void __launch_bounds__(128, 3) lora_up_grad_weight_thin_bf16_##RANKS(                   \
        const unsigned short* __restrict__ dy, const unsigned short* __restrict__ s, float* __restrict__ db,     \
        unsigned* arrivals, float4* partials, unsigned tokens, unsigned grain, unsigned piece,                   \
        unsigned pieces_of_grain, unsigned pieces, unsigned rank, unsigned ranks, unsigned n_out, float scale,   \
        PARTS_PARAMETERS) {                                                                                      \
        thin_up_grad_weight_tile<ThinSum<Bf16, 64, RANKS>>(dy, s, db, arrivals, partials,                        \
                                                           Ranks{rank, ranks, n_out}, scale,                     \
                                                           Cut{tokens, grain, piece, pieces_of_grain, pieces},   \
                                                           PARTS_GIVEN);                                         \
    }

UP_GRAD_WEIGHT(16)
UP_GRAD_WEIGHT(32)
UP_GRAD_WEIGHT(48)
