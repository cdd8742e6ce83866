// y[t, first + o] = fma(scale, sum_k s[t, part * rank + k] * b[row + o, k], y[t, first + o]), one fma chain over
// ascending k, for the columns of up to four parts.
#include "lora_f32.cuh"

#define UP(NAME, TILE)                                                                                           \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS, 4)                                               \
        lora_up_f32##NAME(const float* __restrict__ s, const float* __restrict__ b, float* y, unsigned rows,     \
                     unsigned rank, unsigned ranks, unsigned n_out, float scale, PARTS_PARAMETERS) {             \
        lora_up_tile<TILE>(s, b, y, rows, Ranks{rank, ranks, n_out}, scale, PARTS_GIVEN);                        \
    }

using Tile64x32 = Small<64, 32, 32, 3, 4, 4, Inner::K, Inner::K, true>;
using Tile64x32Any = Small<64, 32, 32, 3, 4, 4, Inner::K, Inner::K, false>;

UP(, Tile64x32)
UP(_any, Tile64x32Any)
