// The norm of the gradients and the step's decision. One block.
#include "clip.cuh"

extern "C" __global__ void __launch_bounds__(1024) clip_f32(
    const double* __restrict__ partials, const float* __restrict__ loss, const float* __restrict__ scalars,
    unsigned* __restrict__ report, unsigned n)
{
    extern __shared__ double levels[];
    const float step_loss = loss[0];
    const double squares = clip::sum_of(partials, n, levels);
    if (threadIdx.x == 0) {
        clip::decide<false>(squares, step_loss, scalars, report, nullptr, 0);
    }
}
