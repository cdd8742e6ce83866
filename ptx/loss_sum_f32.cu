// The loss from the row losses, by one block: the leaves are in dynamic shared memory when `in_shared`, else in the
// workspace.
#include "loss_sum.cuh"

extern "C" __global__ void __launch_bounds__(1024) loss_sum_f32(
    const float* __restrict__ row_loss, const float* __restrict__ scalars, float* __restrict__ loss,
    float* workspace, unsigned in_shared, unsigned tokens, unsigned grain, unsigned piece)
{
    extern __shared__ float places[];
    loss_sum::sum(row_loss, scalars, loss, in_shared ? places : workspace, tokens, grain, piece);
}
