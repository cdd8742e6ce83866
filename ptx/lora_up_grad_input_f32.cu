// ds[t, part * rank + k] = (sum_o dy[t, first + o] * b[row + o, k]) * scale, one fma chain over the part's ascending
// columns, for up to four parts.
#include "lora_f32.cuh"

#define UP_GRAD(NAME, TILE)                                                                                      \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS, 4)                                               \
        lora_up_grad_input_f32##NAME(const float* __restrict__ dy, const float* __restrict__ b,                  \
                     float* __restrict__ ds, unsigned rows, unsigned rank, unsigned ranks, unsigned n_out,       \
                     float scale, PARTS_PARAMETERS) {                                                            \
        lora_up_grad_input_tile<TILE>(dy, b, ds, rows, Ranks{rank, ranks, n_out}, scale, PARTS_GIVEN);           \
    }

using Tile32x32 = Small<32, 32, 32, 5, 2, 4, Inner::K, Inner::OUTER, true>;
using Tile32x32Any = Small<32, 32, 32, 5, 2, 4, Inner::K, Inner::OUTER, false>;

UP_GRAD(, Tile32x32)
UP_GRAD(_any, Tile32x32Any)
