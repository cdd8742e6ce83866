// The norm of gradients that carry a loss scale, the step's decision, and the loss scale of the next step. One block.
#include "clip.cuh"

extern "C" __global__ void __launch_bounds__(1024) clip_f16(
    const double* __restrict__ partials, const float* __restrict__ loss, const float* __restrict__ scalars,
    unsigned* __restrict__ report, unsigned* __restrict__ state, unsigned n, unsigned growth_interval)
{
    extern __shared__ double levels[];
    const float step_loss = loss[0];
    const double squares = clip::sum_of(partials, n, levels);
    if (threadIdx.x == 0) {
        clip::decide<true>(squares, step_loss, scalars, report, state, growth_interval);
    }
}
