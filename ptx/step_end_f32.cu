// What stands between the last gradient and the optimizer, in one launch: the first block sums the loss, each other
// one a block of squared gradients, and the last of all to arrive decides on the step.
#include "clip.cuh"
#include "grad_squares.cuh"
#include "loss_sum.cuh"

// Dynamic shared memory: what the loss and the decision need each, one after the other.
extern "C" __global__ void __launch_bounds__(grad_squares::LANES, 2) step_end_f32(
    const float* __restrict__ row_loss, const float* scalars, float* loss, unsigned tokens, unsigned grain,
    unsigned piece, const float* __restrict__ grad, double* partials, unsigned n_low, unsigned n_high,
    unsigned* report, unsigned n, unsigned* counter)
{
    extern __shared__ double shared[];
    if (blockIdx.x == 0) {
        loss_sum::sum(row_loss, scalars, loss, (float*)shared, tokens, grain, piece);
    } else {
        grad_squares::sum_block(grad, (unsigned long long)n_high << 32 | n_low, blockIdx.x - 1, partials);
    }
    if (!contract::last_arrival(counter, gridDim.x)) {
        return;
    }
    const float step_loss = contract::load_other(loss);
    const double squares = clip::sum_of(partials, n, shared);
    if (threadIdx.x == 0) {
        clip::decide<false>(squares, step_loss, scalars, report, nullptr, 0);
    }
}
