// What the kernels of weighted cross-entropy share: the exponential they need, a row's results and the maximum over a
// block (src/op/cross_entropy.rs).
#ifndef BITSTEP_CROSS_ENTROPY_CUH
#define BITSTEP_CROSS_ENTROPY_CUH
#include "contract.cuh"

#define LANES 256
// Elements of a lane that are in work together; their exponentials are independent of each other.
#define BATCH 8
#define STEP (LANES * BATCH)
// Steps by which the maximum stays behind the copies of the next row.
#define LAG 6
// Elements of a lane that are loaded together from the part of a row that is not kept.
#define TAIL_BATCH 16
#define TAIL_STEP (LANES * TAIL_BATCH)

#define INV_NORMALISER 6
#define MINUS_INFINITY contract::from_bits(0xff800000u)
#define NOT_A_NUMBER contract::from_bits(contract::NAN_BITS)

// The greater of two; a NaN where one is a NaN.
__device__ __forceinline__ float greater_or_nan(float a, float b)
{
#ifdef BITSTEP_HOST
    return a != a || b != b ? NOT_A_NUMBER : fmaxf(a, b);
#else
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#endif
}

// `contract::exp` for x from -inf to 0, no NaN: there the upper clamp, the choice of the scale's direction
// and the NaN fall away, and the scale's 2^64 goes into the last sum, where it is exact.
__device__ __forceinline__ float exp_of_nonpositive(float x)
{
    const float lift = 18446744073709551616.0f;
    const float lower = 5.421010862427522e-20f;
    const contract::Reduced e = contract::reduce_exp(fmaxf(x, -104.0f));
    const float p = __fmaf_rn(__fadd_rn(e.r, e.tail), lift, lift);
    return __fmul_rn(contract::from_bits(contract::to_bits(p) + (e.n_bits << 23)), lower);
}

// What a row's statistics give its gradient.
struct Row {
    // log-sum-exp; finite.
    float lse;
    // weight / normaliser, or NaN where a NaN or an infinity makes every gradient one.
    float factor;

    // No logit is above lse: the sum holds exp(0), so its logarithm is not negative.
    __device__ __forceinline__ float gradient(float x) const
    {
        return __fmul_rn(exp_of_nonpositive(__fsub_rn(x, lse)), factor);
    }
    __device__ __forceinline__ float target_gradient(float x) const
    {
        return __fmul_rn(__fsub_rn(exp_of_nonpositive(__fsub_rn(x, lse)), 1.0f), factor);
    }
};

// Loss, hit and gradient factors from the maximum, the sum over exp(x - max) and the target's logit.
// `ordinary`: no logit is a NaN and the maximum is finite. Else every result but the hit is a NaN.
struct Scored {
    Row row;
    float loss;
    unsigned hit;

    __device__ __forceinline__ Scored(float max, float sum, float x, float weight, float inv, bool ordinary)
    {
        row.lse = ordinary ? __fadd_rn(max, contract::log(sum)) : 0.0f;
        row.factor = ordinary ? __fmul_rn(weight, inv) : NOT_A_NUMBER;
        loss = ordinary ? __fmul_rn(__fsub_rn(row.lse, x), weight) : NOT_A_NUMBER;
        hit = x == max;
    }
};

__device__ __forceinline__ bool is_finite(float x)
{
    return (contract::to_bits(x) & 0x7f800000u) != 0x7f800000u;
}

// ------------------------------------------------------------------------------------------- long rows

// The maximum over the block of a value a thread, by `merge`; two barriers.
template <typename Merge>
__device__ __forceinline__ float block_max(float value, float* warps, Merge merge)
{
#pragma unroll
    for (int half = 16; half > 0; half /= 2) {
        value = merge(value, __shfl_xor_sync(contract::WHOLE_WARP, value, half));
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        warps[threadIdx.x / 32] = value;
    }
    __syncthreads();
    value = warps[0];
#pragma unroll
    for (int w = 1; w < LANES / 32; w++) {
        value = merge(value, warps[w]);
    }
    return value;
}

#endif
