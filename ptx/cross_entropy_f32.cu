// Weighted cross-entropy of rows of logits, with the gradient in place (src/op/cross_entropy.rs).
//
// cross_entropy_f32 takes a row a block and keeps what fits of it in shared memory: while the gradient of
// one row leaves, the next row arrives in the places that have been read. cross_entropy_f32_warp256 and
// _warp1024 take a short row a warp and keep it in registers.
#include "async.cuh"
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

// One batch of the gradient that is due and of the copies of the next row; either pointer may be null.
// `left` is how many elements of the kept part stand at this thread's first one and behind it.
template <bool WHOLE>
__device__ __forceinline__ void exchange(float* kept, float* due, const Row& row, const float* next,
                                         unsigned left)
{
    if (due) {
        float x[BATCH];
#pragma unroll
        for (unsigned i = 0; i < BATCH; i++) {
            x[i] = WHOLE || i * LANES < left ? kept[i * LANES] : 0.0f;
        }
#pragma unroll
        for (unsigned i = 0; i < BATCH; i++) {
            x[i] = row.gradient(x[i]);
        }
#pragma unroll
        for (unsigned i = 0; i < BATCH; i++) {
            if (WHOLE || i * LANES < left) {
                due[i * LANES] = x[i];
            }
        }
    }
    if (next) {
#pragma unroll
        for (unsigned i = 0; i < BATCH; i++) {
            if (WHOLE || i * LANES < left) {
                copy_async_at(kept, next, i * LANES);
            }
        }
    }
}

// `logits` [rows, vocab] are kept unless `gradient`. The first `kept` elements of a row stand in dynamic
// shared memory: all of them, or a multiple of TAIL_STEP. Any grid works.
extern "C" __global__ void __launch_bounds__(LANES, 2) cross_entropy_f32(
    const int* __restrict__ targets, const float* __restrict__ weights, const float* __restrict__ scalars,
    float* __restrict__ row_loss, unsigned* __restrict__ row_hit, float* logits, unsigned rows, unsigned vocab,
    unsigned kept, unsigned gradient)
{
    extern __shared__ float cache[];
    __shared__ float warps[LANES / 32];
    __shared__ float lanes[LANES];
    const unsigned t = threadIdx.x;
    const unsigned steps = (kept + STEP - 1) / STEP;
    const unsigned tail = vocab - kept;
    const unsigned tail_steps = (tail + TAIL_STEP - 1) / TAIL_STEP;
    const float inv = scalars[INV_NORMALISER];
    // The row whose gradient is due, and the gradient of its target.
    float* due = nullptr;
    Row due_row = {0.0f, 0.0f};
    unsigned due_target = 0;
    float due_value = 0.0f;
    for (unsigned r = blockIdx.x;; r += gridDim.x) {
        int target = -1;
        for (; r < rows; r += gridDim.x) {
            target = targets[r];
            if ((unsigned)target < vocab) {
                break;
            }
            if (t == 0) {
                row_loss[r] = 0.0f;
                row_hit[r] = 0;
            }
            if (gradient) {
                float* row = logits + (size_t)r * vocab;
                for (unsigned i = t; i < vocab; i += LANES) {
                    row[i] = 0.0f;
                }
            }
        }
        float* next = r < rows ? logits + (size_t)r * vocab : nullptr;
        if (due) {
            // Backwards, as the end of the row was read last.
            for (unsigned s = tail_steps; s-- > 0;) {
                float* out = due + kept + s * TAIL_STEP + t;
                const unsigned left = tail - s * TAIL_STEP;
                float x[TAIL_BATCH];
#pragma unroll
                for (unsigned i = 0; i < TAIL_BATCH; i++) {
                    x[i] = t + i * LANES < left ? out[i * LANES] : 0.0f;
                }
#pragma unroll
                for (unsigned i = 0; i < TAIL_BATCH; i++) {
                    x[i] = due_row.gradient(x[i]);
                }
#pragma unroll
                for (unsigned i = 0; i < TAIL_BATCH; i++) {
                    if (t + i * LANES < left) {
                        out[i * LANES] = x[i];
                    }
                }
            }
        }
        float max = MINUS_INFINITY;
        for (unsigned s = 0; s < steps + LAG; s++) {
            if (s < steps) {
                const unsigned at = s * STEP + t;
                float* due_at = due ? due + at : nullptr;
                const float* next_at = next ? next + at : nullptr;
                if ((s + 1) * STEP <= kept) {
                    exchange<true>(cache + at, due_at, due_row, next_at, STEP);
                } else {
                    exchange<false>(cache + at, due_at, due_row, next_at, at < kept ? kept - at : 0);
                }
            }
            copy_async_commit();
            if (next && s >= LAG) {
                // A thread reads only what it copied itself, so no barrier is needed.
                copy_async_wait<LAG>();
                const unsigned at = (s - LAG) * STEP + t;
                const float* in = cache + at;
                if ((s - LAG + 1) * STEP <= kept) {
#pragma unroll
                    for (unsigned i = 0; i < BATCH; i++) {
                        max = greater_or_nan(max, in[i * LANES]);
                    }
                } else {
                    for (unsigned i = at; i < kept; i += LANES) {
                        max = greater_or_nan(max, cache[i]);
                    }
                }
            }
        }
        // The thread that wrote this place a moment ago writes it again.
        if (due && due_target % LANES == t) {
            due[due_target] = due_value;
        }
        if (!next) {
            return;
        }
        // Backwards, so that the sum finds the start of this part in L2.
        for (unsigned s = tail_steps; s-- > 0;) {
            const float* in = next + kept + s * TAIL_STEP + t;
            const unsigned left = tail - s * TAIL_STEP;
            float x[TAIL_BATCH];
#pragma unroll
            for (unsigned i = 0; i < TAIL_BATCH; i++) {
                x[i] = t + i * LANES < left ? in[i * LANES] : MINUS_INFINITY;
            }
#pragma unroll
            for (unsigned i = 0; i < TAIL_BATCH; i++) {
                max = greater_or_nan(max, x[i]);
            }
        }
        max = block_max(max, warps, greater_or_nan);
        const bool ordinary = is_finite(max);
        if (!ordinary) {
            // Rare: the maximum without the NaNs.
            max = MINUS_INFINITY;
            for (unsigned i = t; i < vocab; i += LANES) {
                max = contract::greater(max, i < kept ? cache[i] : next[i]);
            }
            max = block_max(max, warps, contract::greater);
        }
        max = __fadd_rn(max, 0.0f);
        const float x_target = (unsigned)target < kept ? cache[target] : next[target];
        const float weight = weights[r];
        float sum = 0.0f;
        if (ordinary) {
            const float* in = cache + t;
            // A batch is added while the next one's exponentials are in work; it begins as harmless +0.0.
            float ready[BATCH] = {};
#pragma unroll 2
            for (unsigned s = 0; s < kept / STEP; s++, in += STEP) {
                float x[BATCH];
#pragma unroll
                for (unsigned i = 0; i < BATCH; i++) {
                    x[i] = exp_of_nonpositive(__fsub_rn(in[i * LANES], max));
                }
#pragma unroll
                for (unsigned i = 0; i < BATCH; i++) {
                    sum = __fadd_rn(sum, ready[i]);
                    ready[i] = x[i];
                }
            }
#pragma unroll
            for (unsigned i = 0; i < BATCH; i++) {
                sum = __fadd_rn(sum, ready[i]);
            }
            for (unsigned at = kept / STEP * STEP + t; at < kept; at += LANES) {
                sum = __fadd_rn(sum, exp_of_nonpositive(__fsub_rn(cache[at], max)));
            }
            for (unsigned s = 0; s < tail_steps; s++) {
                const float* in = next + kept + s * TAIL_STEP + t;
                const unsigned left = tail - s * TAIL_STEP;
                float x[TAIL_BATCH];
#pragma unroll
                for (unsigned i = 0; i < TAIL_BATCH; i++) {
                    x[i] = t + i * LANES < left ? in[i * LANES] : MINUS_INFINITY;
                }
                // Behind the end stands exp(-inf) = +0.0, which changes no sum that began at +0.0.
#pragma unroll
                for (unsigned i = 0; i < TAIL_BATCH; i++) {
                    sum = __fadd_rn(sum, exp_of_nonpositive(__fsub_rn(x[i], max)));
                }
            }
        }
        lanes[t] = sum;
        __syncthreads();
        const Scored scored(max, contract::fold_shared(lanes), x_target, weight, inv, ordinary);
        if (t == 0) {
            row_loss[r] = scored.loss;
            row_hit[r] = scored.hit;
        }
        if (gradient) {
            due = next;
            due_row = scored.row;
            due_target = target;
            due_value = scored.row.target_gradient(x_target);
        }
    }
}

// ------------------------------------------------------------------------------------------ short rows

// Thread t of the row's warp holds x[k]: element t + 32 k, so lane t + 32 (k % 8).
template <unsigned ELEMENTS>
__device__ __forceinline__ void warp_row(const int* targets, const float* weights, const float* scalars,
                                         float* row_loss, unsigned* row_hit, float* logits, unsigned rows,
                                         unsigned vocab, unsigned gradient)
{
    const unsigned t = threadIdx.x % 32;
    const unsigned r = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (r >= rows) {
        return;
    }
    float* row = logits + (size_t)r * vocab;
    const int target = targets[r];
    const float weight = weights[r], inv = scalars[INV_NORMALISER];
    float x[ELEMENTS];
#pragma unroll
    for (unsigned k = 0; k < ELEMENTS; k++) {
        x[k] = t + 32 * k < vocab ? row[t + 32 * k] : MINUS_INFINITY;
    }
    if ((unsigned)target >= vocab) {
        if (t == 0) {
            row_loss[r] = 0.0f;
            row_hit[r] = 0;
        }
        if (gradient) {
#pragma unroll
            for (unsigned k = 0; k < ELEMENTS; k++) {
                if (t + 32 * k < vocab) {
                    row[t + 32 * k] = 0.0f;
                }
            }
        }
        return;
    }
    const float x_target = row[target];
    float max = MINUS_INFINITY;
#pragma unroll
    for (unsigned k = 0; k < ELEMENTS; k++) {
        max = greater_or_nan(max, x[k]);
    }
#pragma unroll
    for (int half = 16; half > 0; half /= 2) {
        max = greater_or_nan(max, __shfl_xor_sync(contract::WHOLE_WARP, max, half));
    }
    const bool ordinary = is_finite(max);
    if (!ordinary) {
        max = MINUS_INFINITY;
#pragma unroll
        for (unsigned k = 0; k < ELEMENTS; k++) {
            max = contract::greater(max, x[k]);
        }
        max = contract::fold_max(max);
    }
    max = __fadd_rn(max, 0.0f);
    // Behind the end stands exp(-inf) = +0.0, which changes no sum that began at +0.0.
    float lanes[8] = {};
#pragma unroll
    for (unsigned k = 0; k < ELEMENTS; k++) {
        lanes[k % 8] = __fadd_rn(lanes[k % 8], exp_of_nonpositive(__fsub_rn(x[k], max)));
    }
    const Scored scored(max, contract::fold_strided(lanes), x_target, weight, inv, ordinary);
    if (t == 0) {
        row_loss[r] = scored.loss;
        row_hit[r] = scored.hit;
    }
    if (gradient) {
        const float value = scored.row.target_gradient(x_target);
        // Every thread has read the target's logit.
        __syncwarp(contract::WHOLE_WARP);
#pragma unroll
        for (unsigned k = 0; k < ELEMENTS; k++) {
            const unsigned i = t + 32 * k;
            if (i < vocab) {
                row[i] = i == (unsigned)target ? value : scored.row.gradient(x[k]);
            }
        }
    }
}

// Rows of at most 256 logits, four a block.
extern "C" __global__ void __launch_bounds__(128) cross_entropy_f32_warp256(
    const int* __restrict__ targets, const float* __restrict__ weights, const float* __restrict__ scalars,
    float* __restrict__ row_loss, unsigned* __restrict__ row_hit, float* logits, unsigned rows, unsigned vocab,
    unsigned gradient)
{
    warp_row<8>(targets, weights, scalars, row_loss, row_hit, logits, rows, vocab, gradient);
}

// Rows of at most 1,024 logits, four a block.
extern "C" __global__ void __launch_bounds__(128) cross_entropy_f32_warp1024(
    const int* __restrict__ targets, const float* __restrict__ weights, const float* __restrict__ scalars,
    float* __restrict__ row_loss, unsigned* __restrict__ row_hit, float* logits, unsigned rows, unsigned vocab,
    unsigned gradient)
{
    warp_row<32>(targets, weights, scalars, row_loss, row_hit, logits, rows, vocab, gradient);
}
