// Weighted cross-entropy of rows of logits stored in H, with the gradient in place (src/op/cross_entropy.rs,
// src/num/logits.rs).
//
// `block_rows` takes a row a block and keeps it in shared memory, with as much behind it as registers hold. While the
// gradient of one row leaves tile by tile, the next row arrives in the places that have been read; what has arrived
// becomes weights, rounded, in its place, so that the gradient is one product. `warp_row` takes a short row a warp and keeps
// it in registers, and `any_rows` takes rows of any length at any address.
#pragma once
#include "async.cuh"
#include "cross_entropy.cuh"
#include "narrow.cuh"
#include "softmax.cuh"

namespace cross_entropy {

// Logits that share a reference; the contract's.
constexpr unsigned TILE = 8192;
// Threads of a block of `block_rows`. It takes a tile of shared memory a round, or two where there are registers for it:
// each thread serves one lane in half of the tile, or in one of both.
constexpr unsigned THREADS = 512;
constexpr unsigned PARTS = THREADS / LANES;
// Octets of a thread in a tile.
constexpr unsigned OCTETS = TILE / 8 / THREADS;
// Tiles of the next row that are under way while a round is worked on.
constexpr unsigned AHEAD = 2;
// Tiles of the longest row of `block_rows`.
constexpr unsigned MOST_TILES = 32;

// log2(e) / 128, negated, and 128 log(2).
#define MINUS_K contract::from_bits(0xbc38aa3bu)
#define NATS contract::from_bits(0x42b17218u)
// The least finite number: a row's reference before any logit.
#define FIRST_REFERENCE contract::from_bits(0xff7fffffu)

// What weights are multiplied by before they are rounded; and its inverse.
__device__ __forceinline__ float lifted(float w, narrow::bf16) { return w; }
__device__ __forceinline__ float lifted(float w, narrow::f16) { return __fmul_rn(w, 16384.0f); }
__device__ __forceinline__ float lowered(float w, narrow::bf16) { return w; }
__device__ __forceinline__ float lowered(float w, narrow::f16) { return __fmul_rn(w, 6.103515625e-5f); }

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

template <bool SCALED, typename H>
__device__ __forceinline__ float scale_of(const Call<H>& c)
{
    return SCALED ? __uint_as_float(c.loss_scale[0]) : 1.0f;
}

__device__ __forceinline__ float weight_of(float x, float reference)
{
    return softmax::score_weight(x, MINUS_K, reference);
}

// A row's reference and what its lanes are moved by when a tile raises it.
struct Reference {
    float at;
    float factor;
    float addend;

    __device__ __forceinline__ Reference() : at(FIRST_REFERENCE), factor(1.0f), addend(0.0f) {}
    // Takes the next tile's greatest logit, a NaN if one is.
    __device__ __forceinline__ void take(float top)
    {
        factor = 1.0f;
        addend = 0.0f;
        if (softmax::passes(top, MINUS_K, at)) {
            softmax::raise(at, factor, addend, top, MINUS_K);
        }
    }
    __device__ __forceinline__ float moved(float sum) const { return __fmaf_rn(sum, factor, addend); }
};

// What a row's reference and sum give for its target's logit x.
template <bool SCALED, typename H>
struct Softmax {
    // No logit is a NaN or plus infinity, and there is a weight.
    bool ordinary;
    float loss;
    // What rounded weights beside the row's reference are multiplied by.
    float factor;
    float target_gradient;

    __device__ __forceinline__ Softmax(float reference, float sum, float x, float weight, float inv, float scale)
    {
        ordinary = sum > 0.0f;
        const float nan = NOT_A_NUMBER;
        const float surprise = __fmaf_rn(__fmaf_rn(x, MINUS_K, reference), NATS, contract::log(__fmul_rn(0.5f, sum)));
        loss = ordinary ? __fmul_rn(surprise > 0.0f ? surprise : 0.0f, weight) : nan;
        const float inverse = __frcp_rn(sum);
        const float f = __fmul_rn(weight, inv);
        const float of_sum = __fmul_rn(f, inverse);
        const float p = __fmul_rn(weight_of(x, reference), inverse);
        const float gradient = __fmul_rn(__fsub_rn(p, 1.0f), f);
        factor = ordinary ? (SCALED ? __fmul_rn(of_sum, lowered(scale, H())) : lowered(of_sum, H())) : nan;
        target_gradient = ordinary ? (SCALED ? __fmul_rn(gradient, scale) : gradient) : nan;
    }
};

// A float as an integer of the same order, a NaN above all; and back.
__device__ __forceinline__ int ordered(int bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

// The greatest over a warp or, with a barrier between writing and reading `warps`, over a block.
__device__ __forceinline__ float warp_top(float top)
{
    return __int_as_float(ordered(__reduce_max_sync(contract::WHOLE_WARP, ordered(__float_as_int(top)))));
}
template <unsigned WARPS>
__device__ __forceinline__ void put_top(float top, int* warps)
{
    const int key = __reduce_max_sync(contract::WHOLE_WARP, ordered(__float_as_int(top)));
    if (threadIdx.x % 32 == 0) {
        warps[threadIdx.x / 32] = key;
    }
}
template <unsigned WARPS>
__device__ __forceinline__ float got_top(const int* warps)
{
    return __int_as_float(ordered(__reduce_max_sync(contract::WHOLE_WARP, warps[threadIdx.x % WARPS])));
}
template <unsigned WARPS>
__device__ __forceinline__ float block_top(float top, int* warps)
{
    put_top<WARPS>(top, warps);
    __syncthreads();
    return got_top<WARPS>(warps);
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

// Two logits of minus infinity.
template <typename H>
__device__ __forceinline__ unsigned absent()
{
    return narrow::round2(MINUS_INFINITY, MINUS_INFINITY, H());
}

// The greatest of both halves of words, taken up octet by octet; a NaN if one is.
template <typename H>
struct Top {
    unsigned most;

    __device__ __forceinline__ Top() : most(absent<H>()) {}
    __device__ __forceinline__ void take(uint4 x)
    {
        const unsigned low = narrow::max_nan2(x.x, x.y, H()), high = narrow::max_nan2(x.z, x.w, H());
        most = narrow::max_nan2(most, narrow::max_nan2(low, high, H()), H());
    }
    __device__ __forceinline__ void take(unsigned x) { most = narrow::max_nan2(most, x, H()); }
    __device__ __forceinline__ float value() const
    {
        const float2 x = narrow::widen2(most, H());
        return greater_or_nan(x.x, x.y);
    }
};

// Rounded weights times a factor. `plain`: the factor is finite, so that no product is a NaN.
template <typename H>
__device__ __forceinline__ unsigned scaled_pair(unsigned weights, float factor, bool plain)
{
    const float2 x = narrow::widen2(weights, H());
    const float a = __fmul_rn(x.x, factor), b = __fmul_rn(x.y, factor);
    return plain ? narrow::round2(a, b, H()) : narrow::narrow2(a, b, H());
}
template <typename H>
__device__ __forceinline__ uint4 scaled_octet(uint4 weights, float factor, bool plain)
{
    narrow::Octet x = narrow::widen8<H>(weights);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x.v[i] = __fmul_rn(x.v[i], factor);
    }
    return plain ? narrow::round8<H>(x) : narrow::narrow8<H>(x);
}

// What the threads of a block share about the row they take in and the one that leaves.
struct Shared {
    // The sums of the row's tiles so far; read by pairs too.
    __align__(8) float lanes[LANES];
    // Beside which the weights of each tile are.
    float references[MOST_TILES];
    // What each tile of the leaving row is multiplied by.
    float factors[MOST_TILES];
    int warps[PARTS][THREADS / 32];
};

// `count` less `at`, and zero where that would be negative.
__device__ __forceinline__ unsigned left_of(unsigned count, unsigned at) { return at < count ? count - at : 0; }

// Takes the next tile's greatest logit, a NaN if one is.
__device__ __forceinline__ void take_top(float top, unsigned tile, Reference& reference, Shared& shared)
{
    reference.take(top);
    if (threadIdx.x == 0) {
        shared.references[tile] = reference.at;
    }
}

// A round's TILES tiles in shared memory, of `count` logits in all, become weights, rounded. It gives their greatest logit,
// a NaN if one is. Behind the row's end stand weights of +0.0, which change no sum that began at +0.0.
template <unsigned TILES, bool WHOLE, typename H>
__device__ __forceinline__ float take_round(H* logits, unsigned count, unsigned tile, Reference& reference,
                                            Shared& shared)
{
    constexpr unsigned ROWS = TILES * TILE / THREADS;
    const unsigned part = threadIdx.x / LANES, lane = threadIdx.x % LANES, own_tile = part * TILES / PARTS;
    H* const own = logits + 8 * threadIdx.x;
    const unsigned behind = left_of(count, 8 * threadIdx.x);
#pragma unroll
    for (unsigned k = 0; k < TILES; k++) {
        Top<H> top;
#pragma unroll
        for (unsigned i = 0; i < OCTETS; i++) {
            const unsigned at = k * TILE + 8 * i * THREADS;
            if (WHOLE || at < behind) {
                // A thread reads here only what it copied itself.
                top.take(octet_at(own + at));
            }
        }
        put_top<THREADS / 32>(top.value(), shared.warps[k]);
    }
    __syncthreads();
    float tops = MINUS_INFINITY;
    Reference mine;
#pragma unroll
    for (unsigned k = 0; k < TILES; k++) {
        if (WHOLE || k * TILE < count) {
            const float top = got_top<THREADS / 32>(shared.warps[k]);
            take_top(top, tile + k, reference, shared);
            tops = greater_or_nan(tops, top);
        }
        if (k == 0 || own_tile == k) {
            mine = reference;
        }
    }
    const unsigned first = part * ROWS * LANES;
    H* const in = logits + first + lane;
    const unsigned left = left_of(count, first + lane);
    const bool present = WHOLE || first < count;
    float w[ROWS] = {};
    if (present) {
#pragma unroll
        for (unsigned i = 0; i < ROWS; i++) {
            w[i] = weight_of(WHOLE || i * LANES < left ? narrow::widen(in[i * LANES]) : MINUS_INFINITY, mine.at);
        }
#pragma unroll
        for (unsigned i = 0; i < ROWS; i += 2) {
            const unsigned word = narrow::round2(lifted(w[i], H()), lifted(w[i + 1], H()), H());
            if (WHOLE || i * LANES < left) {
                in[i * LANES] = H{(unsigned short)word};
            }
            if (WHOLE || (i + 1) * LANES < left) {
                in[(i + 1) * LANES] = H{(unsigned short)(word >> 16)};
            }
        }
    }
#pragma unroll
    for (unsigned k = 0; k < PARTS; k++) {
        if (k > 0) {
            __syncthreads();
        }
        if (part == k && present) {
            float sum = tile + k == 0 ? 0.0f : shared.lanes[lane];
            // The first of a tile's parts moves the lane's sum.
            sum = k == 0 || TILES == PARTS ? mine.moved(sum) : sum;
#pragma unroll
            for (unsigned i = 0; i < ROWS; i++) {
                sum = __fadd_rn(sum, w[i]);
            }
            shared.lanes[lane] = sum;
        }
    }
    return tops;
}

// The gradient of a tile of weights leaves to `due` if `leaves`, and the next row's tile comes into its place from `next` if
// `comes`. (Pointers that may be null make stores by generic addresses, which order every other access to memory.)
template <typename H>
__device__ __forceinline__ void exchange_tile(H* place, H* due, bool leaves, const H* next, bool comes, unsigned count,
                                              float factor, bool plain)
{
    place += 8 * threadIdx.x, due += 8 * threadIdx.x, next += 8 * threadIdx.x;
    const unsigned left = left_of(count, 8 * threadIdx.x);
#pragma unroll
    for (unsigned i = 0; i < OCTETS; i++) {
        const unsigned at = 8 * i * THREADS;
        if (at < left) {
            if (leaves) {
                octet_at(due + at) = scaled_octet<H>(octet_at(place + at), factor, plain);
            }
            if (comes) {
                copy_octet(place + at, next + at);
            }
        }
    }
}

// The greatest logit of a row that is not a NaN; barriers before and behind the use of `warps`.
template <unsigned WARPS, typename H>
__device__ __forceinline__ float greatest_number(const H* row, unsigned vocab, int* warps)
{
    float max = MINUS_INFINITY;
    for (unsigned i = threadIdx.x; i < vocab; i += 32 * WARPS) {
        max = contract::greater(max, narrow::widen(row[i]));
    }
    __syncthreads();
    max = block_top<WARPS>(max, warps);
    __syncthreads();
    return max;
}

// The row of which `target` is the first one at or behind `row`, by the grid's stride, that is scored; the others
// get zeros. At least `c.rows` where there is none.
template <unsigned BLOCK, unsigned VECTOR, typename H>
__device__ __forceinline__ unsigned next_row(const Call<H>& c, unsigned row, int& target)
{
    for (; row < c.rows; row += gridDim.x) {
        target = c.targets[row];
        if ((unsigned)target < c.vocab) {
            break;
        }
        if (threadIdx.x == 0) {
            c.row_loss[row] = 0.0f;
            c.row_hit[row] = 0;
        }
        H* logits = c.logits + (size_t)row * c.vocab;
        for (unsigned at = VECTOR * threadIdx.x; c.gradient && at < c.vocab; at += VECTOR * BLOCK) {
            if (VECTOR == 8) {
                octet_at(logits + at) = make_uint4(0, 0, 0, 0);
            } else {
                logits[at] = H{0};
            }
        }
    }
    return row;
}

// The line of 128 bytes at `p` is read into the L2 cache.
template <typename H>
__device__ __forceinline__ void prefetch(const H* p)
{
#ifndef BITSTEP_HOST
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

// The part of a row behind what shared memory keeps, in registers: at most MOST tiles, logits at first, then weights.
// Here a thread serves two neighbouring lanes, so that a word is loaded and stored as it is kept.
template <unsigned MOST, typename H>
struct Tail {
    static constexpr unsigned PAIRS = LANES / 2;
    static constexpr unsigned PAIR_PARTS = THREADS / PAIRS;
    static constexpr unsigned WORDS = TILE / 2 / THREADS;
    // No compiler takes an array of none.
    unsigned words[MOST == 0 ? 1 : MOST][WORDS];

    // The place of this thread's first word in a tile; the others stand LANES apart.
    static __device__ __forceinline__ unsigned place()
    {
        return threadIdx.x / PAIRS * WORDS * LANES + 2 * (threadIdx.x % PAIRS);
    }
    // The thread that holds element `at` of a tile.
    static __device__ __forceinline__ unsigned owner(unsigned at) { return at / LANES / WORDS * PAIRS + at % LANES / 2; }

    // The tile of `row` that begins at `start`.
    __device__ __forceinline__ void load(unsigned k, const H* row, unsigned start, unsigned vocab)
    {
        const H* const in = row + start + place();
        const unsigned left = left_of(vocab, start + place());
#pragma unroll
        for (unsigned i = 0; i < WORDS; i++) {
            words[k][i] = i * LANES < left ? *reinterpret_cast<const unsigned*>(in + i * LANES) : absent<H>();
        }
    }
    __device__ __forceinline__ float top(unsigned k) const
    {
        Top<H> top;
#pragma unroll
        for (unsigned i = 0; i < WORDS; i++) {
            top.take(words[k][i]);
        }
        return top.value();
    }
    // Its logits become weights, rounded, which are added to the lanes' sums. `first`: there are none yet.
    __device__ __forceinline__ void take(unsigned k, const Reference& reference, bool first, Shared& shared)
    {
        float2 w[WORDS];
#pragma unroll
        for (unsigned i = 0; i < WORDS; i++) {
            const float2 x = narrow::widen2(words[k][i], H());
            w[i] = make_float2(weight_of(x.x, reference.at), weight_of(x.y, reference.at));
            words[k][i] = narrow::round2(lifted(w[i].x, H()), lifted(w[i].y, H()), H());
        }
        float2& lanes = reinterpret_cast<float2*>(shared.lanes)[threadIdx.x % PAIRS];
#pragma unroll
        for (unsigned p = 0; p < PAIR_PARTS; p++) {
            if (p > 0) {
                __syncthreads();
            }
            if (threadIdx.x / PAIRS == p) {
                float2 sum = first && p == 0 ? make_float2(0.0f, 0.0f) : lanes;
                if (p == 0) {
                    sum = make_float2(reference.moved(sum.x), reference.moved(sum.y));
                }
#pragma unroll
                for (unsigned i = 0; i < WORDS; i++) {
                    sum = make_float2(__fadd_rn(sum.x, w[i].x), __fadd_rn(sum.y, w[i].y));
                }
                lanes = sum;
            }
        }
    }
    __device__ __forceinline__ void leave(unsigned k, H* row, unsigned start, unsigned vocab, float factor, bool plain) const
    {
        H* const out = row + start + place();
        const unsigned left = left_of(vocab, start + place());
#pragma unroll
        for (unsigned i = 0; i < WORDS; i++) {
            if (i * LANES < left) {
                *reinterpret_cast<unsigned*>(out + i * LANES) = scaled_pair<H>(words[k][i], factor, plain);
            }
        }
    }
};

// The row whose gradient is due.
template <typename H>
struct Due {
    // Whether there is one.
    bool any;
    H* row;
    unsigned target;
    float target_gradient;
    // Whether the factors are finite.
    bool plain;

    // Puts the target's gradient over what stands there: the thread does that has written it. `kept` is what left
    // from shared memory, by octets.
    __device__ __forceinline__ void correct(unsigned kept) const
    {
        const unsigned at = target % TILE;
        const unsigned by_octets = at / 8 % THREADS;
        if (any && threadIdx.x == (target < kept ? by_octets : Tail<1, H>::owner(at))) {
            row[target] = narrow::narrowed<H>(target_gradient);
        }
    }
};

// Rows aligned to 16 bytes, of a multiple of 8 elements and at most MOST_TILES tiles. The first `kept` elements of a
// row stand in dynamic shared memory: all of them or, with a TAIL, the tiles of one or more whole rounds, behind
// which there are at most TAIL more. Any grid works.
template <unsigned TAIL, bool SCALED, typename H>
__device__ __forceinline__ void block_rows(const Call<H>& c, unsigned kept)
{
    extern __shared__ __align__(16) unsigned char bytes[];
    H* const cache = reinterpret_cast<H*>(bytes);
    __shared__ Shared shared;
    constexpr unsigned TILES = TAIL > 0 ? 2 : 1, ROUNDS_AHEAD = AHEAD / TILES;
    const unsigned t = threadIdx.x, vocab = c.vocab;
    const unsigned tiles = (kept + TILE - 1) / TILE, all = (vocab + TILE - 1) / TILE;
    const unsigned rounds = (tiles + TILES - 1) / TILES;
    const float inv = c.scalars[INV_NORMALISER], scale = scale_of<SCALED>(c);
    Tail<TAIL, H> tail;
    Due<H> due = {false, c.logits, 0, 0.0f, false};
    for (unsigned r = blockIdx.x;; r += gridDim.x) {
        int target = -1;
        r = next_row<THREADS, 8>(c, r, target);
        const bool comes = r < c.rows;
        H* const next = c.logits + (comes ? (size_t)r * vocab : 0);
        const float x_target = comes ? narrow::widen(next[target]) : 0.0f;
        const float weight = comes ? c.weights[r] : 0.0f;
        Reference reference;
        float max = MINUS_INFINITY;
        const auto take_kept = [&](unsigned round) {
            const unsigned tile = round * TILES, first = tile * TILE;
            const float top = TAIL > 0 || kept - first >= TILES * TILE
                                  ? take_round<TILES, true>(cache + first, TILES * TILE, tile, reference, shared)
                                  : take_round<TILES, false>(cache + first, kept - first, tile, reference, shared);
            max = greater_or_nan(max, top);
        };
        // The tail's tiles are read into the cache ahead of the registers, so that memory has as much to do for each tile of
        // a row; behind the row's end follow the first tiles of the block's next row.
        const auto prefetch_tile = [&](unsigned tile) {
            const unsigned row = tile < all ? r : r + gridDim.x, at = (tile < all ? tile : tile - all) * TILE + 64 * t;
            if (t < TILE / 64 && row < c.rows && at < vocab) {
                prefetch(c.logits + (size_t)row * vocab + at);
            }
        };
        // The gradient of a tail's tile leaves, and the next row's tile takes its registers.
        const auto exchange_tail = [&](unsigned k) {
            const unsigned start = (tiles + k) * TILE;
            if (due.any && tiles + k < all) {
                tail.leave(k, due.row, start, vocab, shared.factors[tiles + k], due.plain);
            }
            if (comes) {
                tail.load(k, next, start, vocab);
            }
        };
        for (unsigned tile = tiles; TAIL > 0 && comes && tile < tiles + AHEAD; tile++) {
            prefetch_tile(tile);
        }
        // Before a long row's last kept tile is taken, its tail begins to come.
        const unsigned end = rounds + ROUNDS_AHEAD - (TAIL > 0 ? 1 : 0);
        for (unsigned s = 0; s < end; s++) {
#pragma unroll
            for (unsigned tile = s * TILES; tile < (s + 1) * TILES; tile++) {
                const unsigned start = tile * TILE;
                if (tile < tiles) {
                    exchange_tile<H>(cache + start, due.row + start, due.any, next + start, comes, kept - start,
                                     due.any ? shared.factors[tile] : 0.0f, due.plain);
                }
            }
            copy_async_commit();
            if (comes && s >= ROUNDS_AHEAD) {
                copy_async_wait<ROUNDS_AHEAD>();
                take_kept(s - ROUNDS_AHEAD);
            }
        }
        if (TAIL > 0) {
            exchange_tail(0);
            if (comes) {
                copy_async_wait<0>();
                take_kept(rounds - 1);
            }
        }
#pragma unroll
        for (unsigned k = 0; k < TAIL; k++) {
            const unsigned tile = tiles + k;
            if (tile < all) {
                if (k + 1 < TAIL) {
                    exchange_tail(k + 1);
                }
                if (comes) {
                    prefetch_tile(tile + AHEAD);
                    const float top = block_top<THREADS / 32>(tail.top(k), shared.warps[0]);
                    take_top(top, tile, reference, shared);
                    max = greater_or_nan(max, top);
                    tail.take(k, reference, tile == 0, shared);
                }
            }
        }
        due.correct(kept);
        if (!comes) {
            return;
        }
        __syncthreads();
        const float sum = contract::fold_shared(shared.lanes);
        const Softmax<SCALED, H> row(reference.at, sum, x_target, weight, inv, scale);
        if (!row.ordinary) {
            max = greatest_number<THREADS / 32>(next, vocab, shared.warps[0]);
        }
        if (t == 0) {
            c.row_loss[r] = row.loss;
            c.row_hit[r] = x_target == max;
        }
        if (c.gradient) {
            due = {true, next, (unsigned)target, row.target_gradient, is_finite(row.factor)};
            for (unsigned i = t; i < all; i += THREADS) {
                const float moved = softmax::half_weight(__fsub_rn(reference.at, shared.references[i]));
                shared.factors[i] = __fmul_rn(row.factor, moved);
            }
            __syncthreads();
        }
    }
}

// Rows of any length at any address, read once for each tile's maximum and once for its weights, and so again for the
// gradient.
template <bool SCALED, typename H>
__device__ __forceinline__ void any_rows(const Call<H>& c)
{
    __shared__ int warps[LANES / 32];
    __shared__ float lanes[LANES];
    const unsigned t = threadIdx.x, vocab = c.vocab;
    const float inv = c.scalars[INV_NORMALISER], scale = scale_of<SCALED>(c);
    for (unsigned r = blockIdx.x;; r += gridDim.x) {
        int target = -1;
        r = next_row<LANES, 1>(c, r, target);
        if (r >= c.rows) {
            return;
        }
        H* row = c.logits + (size_t)r * vocab;
        const float x_target = narrow::widen(row[target]);
        auto take = [&](Reference& reference, unsigned start) {
            const unsigned end = min(start + TILE, vocab);
            float top = MINUS_INFINITY;
#pragma unroll 8
            for (unsigned i = start + t; i < end; i += LANES) {
                top = greater_or_nan(top, narrow::widen(row[i]));
            }
            __syncthreads();
            top = block_top<LANES / 32>(top, warps);
            reference.take(top);
            return top;
        };
        Reference reference;
        float max = MINUS_INFINITY, sum = 0.0f;
        for (unsigned start = 0; start < vocab; start += TILE) {
            max = greater_or_nan(max, take(reference, start));
            sum = reference.moved(sum);
            const unsigned end = min(start + TILE, vocab);
#pragma unroll 8
            for (unsigned i = start + t; i < end; i += LANES) {
                sum = __fadd_rn(sum, weight_of(narrow::widen(row[i]), reference.at));
            }
        }
        lanes[t] = sum;
        __syncthreads();
        const Softmax<SCALED, H> of(reference.at, contract::fold_shared(lanes), x_target, c.weights[r], inv, scale);
        if (!of.ordinary) {
            max = greatest_number<LANES / 32>(row, vocab, warps);
        }
        if (t == 0) {
            c.row_loss[r] = of.loss;
            c.row_hit[r] = x_target == max;
        }
        Reference again;
        for (unsigned start = 0; c.gradient && start < vocab; start += TILE) {
            take(again, start);
            const float factor = __fmul_rn(of.factor, softmax::half_weight(__fsub_rn(reference.at, again.at)));
            const unsigned end = min(start + TILE, vocab);
#pragma unroll 8
            for (unsigned i = start + t; i < end; i += LANES) {
                const H weight = narrow::narrowed<H>(lifted(weight_of(narrow::widen(row[i]), again.at), H()));
                const float x = i == (unsigned)target ? of.target_gradient : __fmul_rn(narrow::widen(weight), factor);
                row[i] = narrow::narrowed<H>(x);
            }
        }
    }
}

// Thread t of the row's warp holds x[k]: element t + 32 k, so lane t + 32 (k % 8). The row is one tile.
template <unsigned ELEMENTS, bool SCALED, typename H>
__device__ __forceinline__ void warp_row(const Call<H>& c)
{
    static_assert(32 * ELEMENTS <= TILE, "one tile");
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
    max = warp_top(max);
    Reference reference;
    reference.take(max);
    if (contract::is_nan(max)) {
        max = MINUS_INFINITY;
#pragma unroll
        for (unsigned k = 0; k < ELEMENTS; k++) {
            max = contract::greater(max, x[k]);
        }
        max = warp_top(max);
    }
    // Behind the end stands a weight of +0.0, which changes no sum that began at +0.0.
    float lanes[8];
#pragma unroll
    for (unsigned k = 0; k < 8; k++) {
        lanes[k] = reference.moved(0.0f);
    }
#pragma unroll
    for (unsigned k = 0; k < ELEMENTS; k++) {
        x[k] = weight_of(x[k], reference.at);
        lanes[k % 8] = __fadd_rn(lanes[k % 8], x[k]);
    }
    const Softmax<SCALED, H> of(reference.at, contract::fold_strided(lanes), x_target, weight, inv, scale);
    if (t == 0) {
        c.row_loss[r] = of.loss;
        c.row_hit[r] = x_target == max;
    }
    if (c.gradient) {
        const float factor = __fmul_rn(of.factor, softmax::half_weight(0.0f));
        // Every thread has read the target's logit.
        __syncwarp(contract::WHOLE_WARP);
#pragma unroll
        for (unsigned k = 0; k < ELEMENTS; k++) {
            const unsigned i = t + 32 * k;
            if (i < vocab) {
                const float w = narrow::widen(narrow::narrowed<H>(lifted(x[k], H())));
                row[i] = narrow::narrowed<H>(i == (unsigned)target ? of.target_gradient : __fmul_rn(w, factor));
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

// Tiles behind the kept part of a long row.
#define CROSS_ENTROPY_TAIL 5

// Rows of at most 256 or 1,024 logits go four a block.
#define CROSS_ENTROPY_ENTRIES(H, SCALED)                                                                     \
    extern "C" __global__ void __launch_bounds__(cross_entropy::THREADS, 2) cross_entropy_##H(                \
        CROSS_ENTROPY_PARAMETERS(H), unsigned kept, unsigned gradient)                                       \
    {                                                                                                         \
        cross_entropy::block_rows<0, SCALED>(CROSS_ENTROPY_CALL(H), kept);                                    \
    }                                                                                                         \
    extern "C" __global__ void __launch_bounds__(cross_entropy::THREADS, 1) cross_entropy_##H##_long(         \
        CROSS_ENTROPY_PARAMETERS(H), unsigned kept, unsigned gradient)                                       \
    {                                                                                                         \
        cross_entropy::block_rows<CROSS_ENTROPY_TAIL, SCALED>(CROSS_ENTROPY_CALL(H), kept);                   \
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
