// Weighted cross-entropy of rows of logits, with the gradient in place (src/op/cross_entropy.rs).
//
// cross_entropy_f32 takes a row a block and keeps what fits of it in shared memory: while the gradient of
// one row leaves, the next row arrives in the places that have been read. cross_entropy_f32_warp256 and
// _warp1024 take a short row a warp and keep it in registers.
#include "async.cuh"
#include "cross_entropy.cuh"

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
