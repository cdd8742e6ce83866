// Weighted cross-entropy of rows of logits stored in H, with the gradient in place (src/op/cross_entropy.rs).
//
// `block_rows` takes a row a block and keeps what fits of it in shared memory: while the gradient of one row leaves,
// the next row arrives in the places that have been read. Copies, maximum and gradient go by octets of elements; the
// sum goes lane by lane, as its order demands. `warp_row` takes a short row a warp and keeps it in registers, and
// `any_rows` takes rows of any length at any address.
#pragma once
#include "async.cuh"
#include "cross_entropy.cuh"
#include "narrow.cuh"

namespace cross_entropy {

// Octets of a thread that are loaded together from the part of a row that is not kept.
constexpr unsigned TAIL_OCTETS = 2;
// An exponential of an argument not below this has a normal result, near or far from rounding.
constexpr float LEAST_NORMAL = -87.0f;

// `contract::exp` for x from LEAST_NORMAL to 0: there no clamp acts and the scaling is exact, so it is an addition
// to the exponent.
__device__ __forceinline__ float exp_normal(float x)
{
    const contract::Reduced e = contract::reduce_exp(x);
    const float p = __fadd_rn(1.0f, __fadd_rn(e.r, e.tail));
    return contract::from_bits(contract::to_bits(p) + (e.n_bits << 23));
}

template <bool NORMAL>
__device__ __forceinline__ float exponential(float x)
{
    return NORMAL ? exp_normal(x) : exp_of_nonpositive(x);
}

// The operands of a call. The loss scale is a pointer to its slot, and null where there is none.
template <typename H>
struct Call {
    const int* targets;
    const float* weights;
    const float* scalars;
    const unsigned* loss_scale;
    float* row_loss;
    unsigned* row_hit;
    H* logits;
    unsigned rows;
    unsigned vocab;
    unsigned gradient;
};

// What a row's statistics give its gradient.
template <bool SCALED>
struct Gradient {
    // log-sum-exp; finite.
    float lse;
    // weight / normaliser, or NaN where a NaN or an infinity makes every gradient one.
    float factor;
    // The loss scale, a power of two.
    float scale;
    // Whether every exponential of the row is normal, and the factor finite.
    bool normal;

    __device__ __forceinline__ float scaled(float x) const { return SCALED ? __fmul_rn(x, scale) : x; }
    template <bool NORMAL>
    __device__ __forceinline__ float of(float x) const
    {
        return scaled(__fmul_rn(exponential<NORMAL>(__fsub_rn(x, lse)), factor));
    }
    __device__ __forceinline__ float of_target(float x) const
    {
        return scaled(__fmul_rn(__fsub_rn(exp_of_nonpositive(__fsub_rn(x, lse)), 1.0f), factor));
    }
    template <typename H>
    __device__ __forceinline__ uint4 of_octet(uint4 words) const
    {
        narrow::Octet x = narrow::widen8<H>(words);
        if (normal) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                x.v[i] = of<true>(x.v[i]);
            }
            // Normal exponentials and a finite factor make no NaN.
            return narrow::round8<H>(x);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                x.v[i] = of<false>(x.v[i]);
            }
        }
        return narrow::narrow8<H>(x);
    }
};

template <bool SCALED, typename H>
__device__ __forceinline__ float scale_of(const Call<H>& c)
{
    return SCALED ? __uint_as_float(c.loss_scale[0]) : 1.0f;
}

// 16 bytes from global to shared memory, both addresses a multiple of 16.
template <typename H>
__device__ __forceinline__ void copy_octet(H* to, const H* from)
{
    copy_async_16(reinterpret_cast<float*>(to), reinterpret_cast<const float*>(from), true);
}

template <typename H>
__device__ __forceinline__ uint4& octet_at(H* p)
{
    return *reinterpret_cast<uint4*>(p);
}

// The greatest and the least of both halves of two words, taken up octet by octet.
template <typename H>
struct Range {
    unsigned most;
    unsigned least;

    __device__ __forceinline__ Range()
        : most(narrow::round2(MINUS_INFINITY, MINUS_INFINITY, H())),
          least(narrow::round2(-MINUS_INFINITY, -MINUS_INFINITY, H()))
    {
    }
    __device__ __forceinline__ void take(uint4 x)
    {
        most = narrow::max_nan2(narrow::max_nan2(most, x.x, H()), narrow::max_nan2(narrow::max_nan2(x.y, x.z, H()), x.w, H()), H());
        least = narrow::min2(narrow::min2(least, x.x, H()), narrow::min2(narrow::min2(x.y, x.z, H()), x.w, H()), H());
    }
    __device__ __forceinline__ float max() const
    {
        const float2 x = narrow::widen2(most, H());
        return greater_or_nan(x.x, x.y);
    }
    __device__ __forceinline__ float min() const
    {
        const float2 x = narrow::widen2(least, H());
        return fminf(x.x, x.y);
    }
};

// Elements t, t + 256, … of the kept part, added to `sum` as one chain.
template <bool NORMAL, typename H>
__device__ __forceinline__ float sum_kept(const H* cache, unsigned kept, float max)
{
    const unsigned t = threadIdx.x;
    const H* in = cache + t;
    float sum = 0.0f;
    // A batch is added while the next one's exponentials are in work; it begins as harmless +0.0.
    float ready[BATCH] = {};
#pragma unroll 2
    for (unsigned s = 0; s < kept / STEP; s++, in += STEP) {
        float x[BATCH];
#pragma unroll
        for (unsigned i = 0; i < BATCH; i++) {
            x[i] = exponential<NORMAL>(__fsub_rn(narrow::widen(in[i * LANES]), max));
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
        sum = __fadd_rn(sum, exponential<NORMAL>(__fsub_rn(narrow::widen(cache[at]), max)));
    }
    return sum;
}

// The same for the rest of the row, which continues `sum`.
template <typename H>
__device__ __forceinline__ float sum_tail(const H* tail, unsigned n, float max, float sum)
{
    for (unsigned at = threadIdx.x; at < n; at += TAIL_STEP) {
        float x[TAIL_BATCH];
#pragma unroll
        for (unsigned i = 0; i < TAIL_BATCH; i++) {
            x[i] = at + i * LANES < n ? narrow::widen(tail[at + i * LANES]) : MINUS_INFINITY;
        }
        // Behind the end stands exp(-inf) = +0.0, which changes no sum that began at +0.0.
#pragma unroll
        for (unsigned i = 0; i < TAIL_BATCH; i++) {
            sum = __fadd_rn(sum, exp_of_nonpositive(__fsub_rn(x[i], max)));
        }
    }
    return sum;
}

// Calls `step(at)` for this thread's octets of the n elements from 0, a batch at a time: `load` first for all.
template <typename Load, typename Step>
__device__ __forceinline__ void for_octets(unsigned n, Load load, Step step)
{
    for (unsigned at = 8 * threadIdx.x; at < n; at += TAIL_OCTETS * 8 * LANES) {
        uint4 x[TAIL_OCTETS];
#pragma unroll
        for (unsigned i = 0; i < TAIL_OCTETS; i++) {
            if (at + i * 8 * LANES < n) {
                x[i] = load(at + i * 8 * LANES);
            }
        }
#pragma unroll
        for (unsigned i = 0; i < TAIL_OCTETS; i++) {
            if (at + i * 8 * LANES < n) {
                step(at + i * 8 * LANES, x[i]);
            }
        }
    }
}

// Rows aligned to 16 bytes, of a multiple of 8 elements. The first `kept` elements of a row stand in dynamic shared
// memory: all of them, or a multiple of TAIL_STEP. Any grid works.
template <bool SCALED, typename H>
__device__ __forceinline__ void block_rows(const Call<H>& c, unsigned kept)
{
    extern __shared__ __align__(16) unsigned char bytes[];
    H* const cache = reinterpret_cast<H*>(bytes);
    __shared__ float warps[LANES / 32];
    __shared__ float lanes[LANES];
    const unsigned t = threadIdx.x, vocab = c.vocab;
    const unsigned steps = (kept + STEP - 1) / STEP;
    const unsigned tail = vocab - kept;
    const float inv = c.scalars[INV_NORMALISER];
    // The row whose gradient is due, and the gradient of its target.
    H* due = nullptr;
    Gradient<SCALED> due_row = {0.0f, 0.0f, scale_of<SCALED>(c), false};
    unsigned due_target = 0;
    float due_value = 0.0f;
    for (unsigned r = blockIdx.x;; r += gridDim.x) {
        int target = -1;
        for (; r < c.rows; r += gridDim.x) {
            target = c.targets[r];
            if ((unsigned)target < vocab) {
                break;
            }
            if (t == 0) {
                c.row_loss[r] = 0.0f;
                c.row_hit[r] = 0;
            }
            if (c.gradient) {
                H* row = c.logits + (size_t)r * vocab;
                for (unsigned at = 8 * t; at < vocab; at += STEP) {
                    octet_at(row + at) = make_uint4(0, 0, 0, 0);
                }
            }
        }
        H* next = r < c.rows ? c.logits + (size_t)r * vocab : nullptr;
        if (due) {
            H* out = due + kept;
            for_octets(tail, [&](unsigned at) { return octet_at(out + at); },
                       [&](unsigned at, uint4 x) { octet_at(out + at) = due_row.template of_octet<H>(x); });
        }
        Range<H> range;
        for (unsigned s = 0; s < steps + LAG; s++) {
            const unsigned at = s * STEP + 8 * t;
            if (at < kept) {
                if (due) {
                    octet_at(due + at) = due_row.template of_octet<H>(octet_at(cache + at));
                }
                if (next) {
                    copy_octet(cache + at, next + at);
                }
            }
            copy_async_commit();
            if (next && s >= LAG) {
                // A thread reads only what it copied itself, so no barrier is needed.
                copy_async_wait<LAG>();
                if (at - LAG * STEP < kept) {
                    range.take(octet_at(cache + (at - LAG * STEP)));
                }
            }
        }
        // The thread that wrote this place a moment ago writes it again.
        if (due && due_target / 8 % LANES == t) {
            due[due_target] = narrow::narrowed<H>(due_value);
        }
        if (!next) {
            return;
        }
        for_octets(tail, [&](unsigned at) { return octet_at(next + kept + at); },
                   [&](unsigned, uint4 x) { range.take(x); });
        float max = block_max(range.max(), warps, greater_or_nan);
        const float min = contract::negate(block_max(contract::negate(range.min()), warps, contract::greater));
        const bool ordinary = is_finite(max);
        if (!ordinary) {
            // Rare: the maximum without the NaNs.
            max = MINUS_INFINITY;
            for (unsigned i = t; i < vocab; i += LANES) {
                max = contract::greater(max, narrow::widen(i < kept ? cache[i] : next[i]));
            }
            max = block_max(max, warps, contract::greater);
        }
        max = __fadd_rn(max, 0.0f);
        const float x_target = narrow::widen((unsigned)target < kept ? cache[target] : next[target]);
        const float weight = c.weights[r];
        float sum = 0.0f;
        if (ordinary) {
            const bool normal = __fsub_rn(min, max) >= LEAST_NORMAL;
            sum = normal ? sum_kept<true>(cache, kept, max) : sum_kept<false>(cache, kept, max);
            sum = sum_tail(next + kept, tail, max, sum);
        }
        lanes[t] = sum;
        __syncthreads();
        const Scored scored(max, contract::fold_shared(lanes), x_target, weight, inv, ordinary);
        if (t == 0) {
            c.row_loss[r] = scored.loss;
            c.row_hit[r] = scored.hit;
        }
        if (c.gradient) {
            due = next;
            due_row.lse = scored.row.lse;
            due_row.factor = scored.row.factor;
            due_row.normal = ordinary && is_finite(scored.row.factor) && __fsub_rn(min, scored.row.lse) >= LEAST_NORMAL;
            due_target = target;
            due_value = due_row.of_target(x_target);
        }
    }
}

// Rows of any length at any address, three times read.
template <bool SCALED, typename H>
__device__ __forceinline__ void any_rows(const Call<H>& c)
{
    __shared__ float warps[LANES / 32];
    __shared__ float lanes[LANES];
    const unsigned t = threadIdx.x, vocab = c.vocab;
    const float inv = c.scalars[INV_NORMALISER];
    for (unsigned r = blockIdx.x; r < c.rows; r += gridDim.x) {
        H* row = c.logits + (size_t)r * vocab;
        const int target = c.targets[r];
        if ((unsigned)target >= vocab) {
            if (t == 0) {
                c.row_loss[r] = 0.0f;
                c.row_hit[r] = 0;
            }
            for (unsigned i = t; c.gradient && i < vocab; i += LANES) {
                row[i] = H{0};
            }
            continue;
        }
        const float x_target = narrow::widen(row[target]);
        float max = MINUS_INFINITY;
        for (unsigned i = t; i < vocab; i += LANES) {
            max = greater_or_nan(max, narrow::widen(row[i]));
        }
        max = block_max(max, warps, greater_or_nan);
        const bool ordinary = is_finite(max);
        if (!ordinary) {
            max = MINUS_INFINITY;
            for (unsigned i = t; i < vocab; i += LANES) {
                max = contract::greater(max, narrow::widen(row[i]));
            }
            max = block_max(max, warps, contract::greater);
        }
        max = __fadd_rn(max, 0.0f);
        lanes[t] = ordinary ? sum_tail(row, vocab, max, 0.0f) : 0.0f;
        __syncthreads();
        const Scored scored(max, contract::fold_shared(lanes), x_target, c.weights[r], inv, ordinary);
        if (t == 0) {
            c.row_loss[r] = scored.loss;
            c.row_hit[r] = scored.hit;
        }
        if (c.gradient) {
            const Gradient<SCALED> gradient = {scored.row.lse, scored.row.factor, scale_of<SCALED>(c), false};
            const float value = gradient.of_target(x_target);
            for (unsigned i = t; i < vocab; i += LANES) {
                const float x = i == (unsigned)target ? value : gradient.template of<false>(narrow::widen(row[i]));
                row[i] = narrow::narrowed<H>(x);
            }
        }
    }
}

// Thread t of the row's warp holds x[k]: element t + 32 k, so lane t + 32 (k % 8).
template <unsigned ELEMENTS, bool SCALED, typename H>
__device__ __forceinline__ void warp_row(const Call<H>& c)
{
    const unsigned t = threadIdx.x % 32, vocab = c.vocab;
    const unsigned r = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (r >= c.rows) {
        return;
    }
    H* row = c.logits + (size_t)r * vocab;
    const int target = c.targets[r];
    const float weight = c.weights[r], inv = c.scalars[INV_NORMALISER], scale = scale_of<SCALED>(c);
    float x[ELEMENTS];
#pragma unroll
    for (unsigned k = 0; k < ELEMENTS; k++) {
        x[k] = t + 32 * k < vocab ? narrow::widen(row[t + 32 * k]) : MINUS_INFINITY;
    }
    if ((unsigned)target >= vocab) {
        if (t == 0) {
            c.row_loss[r] = 0.0f;
            c.row_hit[r] = 0;
        }
        for (unsigned i = t; c.gradient && i < vocab; i += 32) {
            row[i] = H{0};
        }
        return;
    }
    const float x_target = narrow::widen(row[target]);
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
        c.row_loss[r] = scored.loss;
        c.row_hit[r] = scored.hit;
    }
    if (c.gradient) {
        const Gradient<SCALED> gradient = {scored.row.lse, scored.row.factor, scale, false};
        const float value = gradient.of_target(x_target);
        // Every thread has read the target's logit.
        __syncwarp(contract::WHOLE_WARP);
#pragma unroll
        for (unsigned k = 0; k < ELEMENTS; k++) {
            const unsigned i = t + 32 * k;
            if (i < vocab) {
                row[i] = narrow::narrowed<H>(i == (unsigned)target ? value : gradient.template of<false>(x[k]));
            }
        }
    }
}

}  // namespace cross_entropy

// The operands that every kernel takes, and the call they make. A file defines CROSS_ENTROPY_SCALE, the pointer to the
// loss scale or null, and CROSS_ENTROPY_SCALE_PARAMETER, the parameter with its comma or nothing.
#define CROSS_ENTROPY_PARAMETERS(H)                                                                           \
    const int *__restrict__ targets, const float *__restrict__ weights, const float *__restrict__ scalars,    \
        CROSS_ENTROPY_SCALE_PARAMETER float *__restrict__ row_loss, unsigned *__restrict__ row_hit,           \
        narrow::H *logits, unsigned rows, unsigned vocab

#define CROSS_ENTROPY_CALL(H)                                                                                 \
    cross_entropy::Call<narrow::H>                                                                            \
    {                                                                                                         \
        targets, weights, scalars, CROSS_ENTROPY_SCALE, row_loss, row_hit, logits, rows, vocab, gradient      \
    }

// Rows of at most 256 or 1,024 logits go four a block.
#define CROSS_ENTROPY_ENTRIES(H, SCALED)                                                                     \
    extern "C" __global__ void __launch_bounds__(LANES, 2) cross_entropy_##H(                                 \
        CROSS_ENTROPY_PARAMETERS(H), unsigned kept, unsigned gradient)                       \
    {                                                                                                         \
        cross_entropy::block_rows<SCALED>(CROSS_ENTROPY_CALL(H), kept);                                \
    }                                                                                                         \
    extern "C" __global__ void __launch_bounds__(LANES, 2) cross_entropy_##H##_any(                           \
        CROSS_ENTROPY_PARAMETERS(H), unsigned gradient)                                      \
    {                                                                                                         \
        cross_entropy::any_rows<SCALED>(CROSS_ENTROPY_CALL(H));                                        \
    }                                                                                                         \
    extern "C" __global__ void __launch_bounds__(128) cross_entropy_##H##_warp256(                            \
        CROSS_ENTROPY_PARAMETERS(H), unsigned gradient)                                      \
    {                                                                                                         \
        cross_entropy::warp_row<8, SCALED>(CROSS_ENTROPY_CALL(H));                                     \
    }                                                                                                         \
    extern "C" __global__ void __launch_bounds__(128) cross_entropy_##H##_warp1024(                           \
        CROSS_ENTROPY_PARAMETERS(H), unsigned gradient)                                      \
    {                                                                                                         \
        cross_entropy::warp_row<32, SCALED>(CROSS_ENTROPY_CALL(H));                                    \
    }
