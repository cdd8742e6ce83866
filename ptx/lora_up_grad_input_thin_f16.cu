// ds[t, part * rank + k] = (sum_o dy[t, first + o] * b[row + o, k]) * scale, as in lora_up_grad_input_f16.cu, where every row
// is whole chunks of 16 bytes.
#include "lora_thin.cuh"

#define UP_GRAD(RANKS, STAGES)                                                                                   \
    extern "C" __global__ void __launch_bounds__(4 * RANKS) lora_up_grad_input_thin_f16_##RANKS(                 \
        const unsigned short* __restrict__ dy, const unsigned short* __restrict__ b, unsigned short* __restrict__ ds, \
        unsigned rows, unsigned rank, unsigned ranks, unsigned n_out, float scale, PARTS_PARAMETERS) {           \
        thin_up_grad_input_tile<ThinRows<F16, RANKS, Inner::OUTER, STAGES>>(                                    \
            dy, b, ds, rows, Ranks{rank, ranks, n_out}, scale, PARTS_GIVEN);                                     \
    }

UP_GRAD(16, 7)
UP_GRAD(32, 5)
UP_GRAD(48, 4)
