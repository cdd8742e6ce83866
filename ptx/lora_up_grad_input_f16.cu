// ds[t, part * rank + k] = (sum_o dy[t, first + o] * b[row + o, k]) * scale, one chain of f16 steps over the part's
// ascending columns, for up to four parts.
#include "lora_tensor.cuh"

#define UP_GRAD(NAME, TILE, VECTORS)                                                                             \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS, 4)                                               \
        lora_up_grad_input_f16##NAME(const unsigned short* __restrict__ dy, const unsigned short* __restrict__ b,     \
                     unsigned short* __restrict__ ds, unsigned rows, unsigned rank, unsigned ranks, unsigned n_out,         \
                     float scale, PARTS_PARAMETERS) {                                                            \
        lora_up_grad_input_tile<TILE, VECTORS>(dy, b, ds, rows, Ranks{rank, ranks, n_out}, scale, PARTS_GIVEN);  \
    }

using Tile32x32 = TensorTile<F16, 32, 32, 2, 1, 6, Inner::K, Inner::OUTER, true>;
using Tile32x32Any = TensorTile<F16, 32, 32, 2, 1, 6, Inner::K, Inner::OUTER, false>;

UP_GRAD(, Tile32x32, true)
UP_GRAD(_any, Tile32x32Any, false)
