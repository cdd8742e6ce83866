// The gradient norm from the partial sums of squares, and the step's decision (src/op/clip.rs); with SCALED, of
// gradients that carry a loss scale, and the loss scale of the next step.
#pragma once
#include "contract.cuh"

namespace clip {

// Words of the scalars slot, and of the report slot (src/op/step_values.rs).
constexpr int SCALAR_MAX_NORM = 4;
constexpr int SCALAR_SPIKE_NORM = 5;
constexpr unsigned NON_FINITE_LOSS = 1;
constexpr unsigned NON_FINITE_NORM = 2;
constexpr unsigned SPIKE = 4;
// Words of the loss scale slot, and the greatest scale.
constexpr int STATE_SCALE = 0;
constexpr int STATE_GOOD_STEPS = 1;
constexpr int STATE_SKIPPED = 2;
constexpr float GREATEST_SCALE = 16777216.0f;

// Chunks that a warp folds together, so that their loads and exchanges overlap.
constexpr unsigned TOGETHER = 4;

__device__ __forceinline__ unsigned canonical_bits(float x)
{
    return x != x ? contract::NAN_BITS : __float_as_uint(x);
}

// Folds `count` leaves, at most 32, one a lane: neighbours pairwise, an odd one carried up as it is, which
// is the balanced tree. The result is in lane 0.
__device__ __forceinline__ double fold_warp(double leaf, unsigned lane, unsigned count)
{
#pragma unroll
    for (unsigned s = 1; s < 32; s *= 2) {
        const double right = __shfl_down_sync(0xffffffffu, leaf, s);
        if (lane % (2 * s) == 0 && lane + s < count) {
            leaf = __dadd_rn(leaf, right);
        }
    }
    return leaf;
}

// Partials may have been written by other blocks of the same launch, so their loads pass L1 by; levels are in shared
// memory.
struct Partials {
    const double* at;
    __device__ __forceinline__ double operator[](unsigned i) const { return __ldcg(at + i); }
};

// One level: 32 leaves become one. Chunk c of `from` goes to to[c]; the two may be the same memory only
// when one warp holds all chunks.
template <typename Leaves>
__device__ __forceinline__ void fold_level(Leaves from, unsigned n, double* to)
{
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const unsigned chunks = (n + 31) / 32;
    for (unsigned first = warp * TOGETHER; first < chunks; first += warps * TOGETHER) {
        double leaf[TOGETHER];
#pragma unroll
        for (unsigned j = 0; j < TOGETHER; j++) {
            const unsigned at = (first + j) * 32 + lane;
            leaf[j] = at < n ? from[at] : 0.0;
        }
#pragma unroll
        for (unsigned j = 0; j < TOGETHER; j++) {
            const unsigned start = (first + j) * 32;
            const unsigned count = start < n ? n - start : 0;
            leaf[j] = fold_warp(leaf[j], lane, count);
            if (lane == 0 && count > 0) {
                to[first + j] = leaf[j];
            }
        }
    }
    __syncthreads();
}

// The sum of all partials, in every thread of the block. `levels`: a double for every 32 partials and one for every
// 1,024, rounded up, in shared memory.
__device__ __forceinline__ double sum_of(const double* partials, unsigned n, double* levels)
{
    double* even = levels;
    double* odd = levels + (n + 31) / 32;
    fold_level(Partials{partials}, n, even);
    unsigned count = (n + 31) / 32;
    while (count > 1) {
        fold_level((const double*)even, count, odd);
        double* swap = even;
        even = odd;
        odd = swap;
        count = (count + 31) / 32;
    }
    return n > 0 ? even[0] : 0.0;
}

// The loss scale's slot after a step; a scale is a power of two.
__device__ __forceinline__ void next_scale(float scale, bool finite, unsigned* state, unsigned growth_interval)
{
    const unsigned good = state[STATE_GOOD_STEPS], skipped = state[STATE_SKIPPED];
    if (!finite) {
        state[STATE_SCALE] = __float_as_uint(fmaxf(__fmul_rn(scale, 0.5f), 1.0f));
        state[STATE_GOOD_STEPS] = 0;
        state[STATE_SKIPPED] = skipped == 0xffffffffu ? skipped : skipped + 1;
    } else if (good + 1 >= growth_interval) {
        state[STATE_SCALE] = __float_as_uint(fminf(__fmul_rn(scale, 2.0f), GREATEST_SCALE));
        state[STATE_GOOD_STEPS] = 0;
    } else {
        state[STATE_GOOD_STEPS] = good + 1;
    }
}

// One thread. Without SCALED there is no `state`.
template <bool SCALED>
__device__ __forceinline__ void decide(double squares, float loss, const float* scalars, unsigned* report,
                                       unsigned* state, unsigned growth_interval)
{
    const float scale = SCALED ? __uint_as_float(state[STATE_SCALE]) : 0.0f;
    const double root = __dsqrt_rn(squares);
    // The scale is a power of two, so the division is exact.
    const double norm = SCALED ? __ddiv_rn(root, (double)scale) : root;
    const double ratio = __ddiv_rn((double)scalars[SCALAR_MAX_NORM], __dadd_rn(norm, 1e-6));
    // A NaN is not below one, as `f64::min` has it.
    const double coefficient = ratio < 1.0 ? ratio : 1.0;
    const bool loss_finite = (__float_as_uint(loss) & 0x7f800000u) != 0x7f800000u;
    const bool norm_finite = ((unsigned long long)__double_as_longlong(norm) >> 52 & 0x7ff) != 0x7ff;
    unsigned dropped = 0;
    dropped |= loss_finite ? 0 : NON_FINITE_LOSS;
    dropped |= norm_finite ? 0 : NON_FINITE_NORM;
    dropped |= norm > (double)scalars[SCALAR_SPIKE_NORM] ? SPIKE : 0;
    report[0] = canonical_bits(loss);
    report[1] = canonical_bits(__double2float_rn(norm));
    report[2] = canonical_bits(__double2float_rn(coefficient));
    report[3] = dropped == 0;
    report[4] = dropped;
    report[5] = __float_as_uint(scale);
    report[6] = 0;
    report[7] = 0;
    if (SCALED) {
        next_scale(scale, loss_finite && norm_finite, state, growth_interval);
    }
}

}  // namespace clip
