// y[t, first + o] = fma(scale, sum_k s[t, part * rank + k] * b[row + o, k], y[t, first + o]), one chain of f16 steps over
// ascending k, for the columns of up to four parts.
#include "lora_tensor.cuh"
#include "lora_wide.cuh"

#define UP(NAME, TILE, VECTORS)                                                                                  \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS, 4)                                               \
        lora_up_f16##NAME(const unsigned short* __restrict__ s, const unsigned short* __restrict__ b, unsigned short* y,       \
                     unsigned rows, unsigned rank, unsigned ranks, unsigned n_out, float scale, PARTS_PARAMETERS) { \
        lora_up_tile<TILE, VECTORS>(s, b, y, rows, Ranks{rank, ranks, n_out}, scale, PARTS_GIVEN);               \
    }

using Tile64x64 = TensorTile<F16, 64, 64, 2, 2, 2, Inner::K, Inner::K, true>;
using Tile64x64Any = TensorTile<F16, 64, 64, 2, 2, 2, Inner::K, Inner::K, false>;

UP(, Tile64x64, true)
UP(_any, Tile64x64Any, false)

// In place by warps down strips of 64 columns, for ranks up to 16, 32 and 48.
UP_WIDE(f16, F16)
