// The sums of squares of the gradients. The grid has one block for every BLOCK elements.
#include "grad_squares.cuh"

extern "C" __global__ void __launch_bounds__(grad_squares::LANES, 2) grad_squares_f32(
    const float* __restrict__ grad, double* __restrict__ partials, unsigned n_low, unsigned n_high)
{
    grad_squares::sum_block(grad, (unsigned long long)n_high << 32 | n_low, blockIdx.x, partials);
}
