// The RMS norm of each query and key head with the weight of its kind, then the rotation, and its gradient, over
// activations stored in H.
//
// Heads of 32, 64, 128 and 256 columns: a group of head_dim / 8 threads takes a head, or forward up to four heads of a row
// and kind, which share their angles, their weight and what their sums cost; thread t of it holds the four elements from
// 4 * t and the four from head_dim / 2 + 4 * t, so both halves of every pair.
#pragma once
#include "narrow.cuh"
#include "rope.cuh"

namespace heads {

using contract::plus;

struct Eight {
    float4 a;
    float4 b;
};

__device__ __forceinline__ float4 mul4(float4 x, float4 y) {
    return make_float4(__fmul_rn(x.x, y.x), __fmul_rn(x.y, y.y), __fmul_rn(x.z, y.z), __fmul_rn(x.w, y.w));
}
__device__ __forceinline__ float4 scale4(float4 x, float s) { return mul4(x, make_float4(s, s, s, s)); }

/// One step of the lanes' chains from +0.0, and the one addition of +0.0 that stands for the folds with the lanes
/// behind a head shorter than 256 (src/num/lanes.rs).
template <bool SHORT>
__device__ __forceinline__ float first_step(float x, float y) {
    const float lane = __fmaf_rn(x, y, 0.0f);
    return SHORT ? __fadd_rn(lane, 0.0f) : lane;
}

/// The dot product of two heads by their group; every thread of it gets the result. All of a warp take part.
template <unsigned THREADS>
__device__ __forceinline__ float head_dot(const Eight& x, const Eight& y) {
    constexpr bool SHORT = THREADS < 32;
    // The fold of the two halves of the head.
    float v0 = plus(first_step<SHORT>(x.a.x, y.a.x), first_step<SHORT>(x.b.x, y.b.x));
    float v1 = plus(first_step<SHORT>(x.a.y, y.a.y), first_step<SHORT>(x.b.y, y.b.y));
    float v2 = plus(first_step<SHORT>(x.a.z, y.a.z), first_step<SHORT>(x.b.z, y.b.z));
    float v3 = plus(first_step<SHORT>(x.a.w, y.a.w), first_step<SHORT>(x.b.w, y.b.w));
    const unsigned t = threadIdx.x;
    constexpr unsigned FIRST = THREADS / 2, SECOND = THREADS / 4;
    const bool upper = (t & FIRST) != 0, odd = (t & SECOND) != 0;
    const float give0 = upper ? v0 : v2, give1 = upper ? v1 : v3;
    v0 = plus(upper ? v2 : v0, __shfl_xor_sync(contract::WHOLE_WARP, give0, FIRST));
    v1 = plus(upper ? v3 : v1, __shfl_xor_sync(contract::WHOLE_WARP, give1, FIRST));
    float v = plus(odd ? v1 : v0, __shfl_xor_sync(contract::WHOLE_WARP, odd ? v0 : v1, SECOND));
#pragma unroll
    for (unsigned half = THREADS / 8; half > 0; half /= 2) v = plus(v, __shfl_xor_sync(contract::WHOLE_WARP, v, half));
    v = plus(v, __shfl_xor_sync(contract::WHOLE_WARP, v, FIRST));
    return plus(v, __shfl_xor_sync(contract::WHOLE_WARP, v, SECOND));
}

/// Heads that a group of threads takes at most.
constexpr unsigned HEADS = 4;

/// A sum over D, a power of two: the product has the quotient's bits.
template <unsigned D>
__device__ __forceinline__ float over(float sum) {
    static_assert((D & (D - 1)) == 0, "a power of two");
    return __fmul_rn(sum, 1.0f / D);
}

/// What a thread adds to the dot product of a head, for four columns of the fold. Behind a head shorter than 256 the
/// folds add +0.0; once, to the finished sum, is enough: an earlier -0.0 decides no other sum.
template <unsigned THREADS>
__device__ __forceinline__ void dot_step(const Eight& x, const Eight& y, float* v) {
    const auto product = [](float a, float b) { return THREADS < 32 ? __fmul_rn(a, b) : __fmaf_rn(a, b, 0.0f); };
    v[0] = plus(product(x.a.x, y.a.x), product(x.b.x, y.b.x));
    v[1] = plus(product(x.a.y, y.a.y), product(x.b.y, y.b.y));
    v[2] = plus(product(x.a.z, y.a.z), product(x.b.z, y.b.z));
    v[3] = plus(product(x.a.w, y.a.w), product(x.b.w, y.b.w));
}

/// The dot product of one of a group's heads, its steps being v[4 * head] and on: thread t gets that of head
/// t / (THREADS / HEADS). Threads share the heads and columns out among them as they fold. All of a warp take part.
template <unsigned THREADS>
__device__ __forceinline__ float head_dots(float (&v)[4 * HEADS]) {
    const auto from = [](float x, unsigned half) { return __shfl_xor_sync(contract::WHOLE_WARP, x, half); };
    unsigned left = 4 * HEADS, first = 0, second = 0;
#pragma unroll
    for (unsigned half = THREADS / 2; half > 0; half /= 2) {
        if (left == 1) {
            v[0] = plus(v[0], from(v[0], half));
            continue;
        }
        if (left == 4) first = half;
        if (left == 2) second = half;
        left /= 2;
        const bool upper = (threadIdx.x & half) != 0;
#pragma unroll
        for (unsigned i = 0; i < left; ++i) {
            const float low = v[i], high = v[i + left];
            v[i] = plus(upper ? high : low, from(upper ? low : high, half));
        }
    }
    // Columns 0 and 2, 1 and 3, then both; in a thread or in two that have shared them.
    if (first == 0) {
        v[0] = plus(plus(v[0], v[2]), plus(v[1], v[3]));
    } else {
        v[0] = plus(v[0], from(v[0], first));
        if (second == 0) v[0] = plus(v[0], plus(v[1], from(v[1], first)));
        else v[0] = plus(v[0], from(v[0], second));
    }
    return THREADS < 32 ? plus(v[0], 0.0f) : v[0];
}

/// Up to HEADS heads of a kind in a row.
struct Group {
    unsigned row, head, count;
    bool key, value;

    __device__ __forceinline__ static unsigned of(unsigned heads) { return (heads + HEADS - 1) / HEADS; }
    /// Group `unit` of `rows` rows. Behind the last one it is that one, with no heads.
    __device__ __forceinline__ Group(unsigned unit, unsigned rows, unsigned n_heads, unsigned n_kv_heads) {
        const unsigned queries = of(n_heads), keys = of(n_kv_heads), row_groups = queries + 2 * keys;
        const bool exists = unit < rows * row_groups;
        unit = exists ? unit : rows * row_groups - 1;
        row = unit / row_groups;
        unsigned g = unit - row * row_groups;
        key = g >= queries, value = g >= queries + keys;
        g -= value ? queries + keys : key ? queries : 0;
        const unsigned left = (key ? n_kv_heads : n_heads) - HEADS * g;
        head = (value ? n_heads + n_kv_heads : key ? n_heads : 0) + HEADS * g;
        count = !exists ? 0 : left < HEADS ? left : HEADS;
    }
};

/// The words of a head's eight elements.
struct Words {
    uint2 a, b;
};
template <typename H>
__device__ __forceinline__ Words load_words(const H* head, unsigned i, unsigned half) {
    return {*reinterpret_cast<const uint2*>(head + i), *reinterpret_cast<const uint2*>(head + half + i)};
}
template <typename H>
__device__ __forceinline__ void store_words(H* head, unsigned i, unsigned half, const Words& x) {
    *reinterpret_cast<uint2*>(head + i) = x.a;
    *reinterpret_cast<uint2*>(head + half + i) = x.b;
}
template <typename H>
__device__ __forceinline__ Eight widened(const Words& x) {
    const narrow::Octet y = narrow::widen8<H>(make_uint4(x.a.x, x.a.y, x.b.x, x.b.y));
    return {make_float4(y.v[0], y.v[1], y.v[2], y.v[3]), make_float4(y.v[4], y.v[5], y.v[6], y.v[7])};
}
template <typename H>
__device__ __forceinline__ Words rounded(const Eight& x) {
    const uint4 y = narrow::narrow8<H>(narrow::Octet{{x.a.x, x.a.y, x.a.z, x.a.w, x.b.x, x.b.y, x.b.z, x.b.w}});
    return {make_uint2(y.x, y.y), make_uint2(y.z, y.w)};
}
/// The number that the threads of a group have for each of its heads.
template <unsigned THREADS>
__device__ __forceinline__ float of_head(float x, unsigned k) {
    return __shfl_sync(contract::WHOLE_WARP, x, (threadIdx.x & 32u - THREADS) + k * (THREADS / HEADS));
}

/// The angles of four pairs, and the pairs turned.
struct Angles {
    float4 first;
    float4 second;
};
__device__ __forceinline__ Angles load_angles(const float* p) { return {contract::load4(p), contract::load4(p + 4)}; }
template <bool INVERSE>
__device__ __forceinline__ void turn4(Eight& x, const Angles& angle) {
    rope::turn<INVERSE>(x.a.x, x.b.x, angle.first.x, angle.first.y);
    rope::turn<INVERSE>(x.a.y, x.b.y, angle.first.z, angle.first.w);
    rope::turn<INVERSE>(x.a.z, x.b.z, angle.second.x, angle.second.y);
    rope::turn<INVERSE>(x.a.w, x.b.w, angle.second.z, angle.second.w);
}

template <typename T>
__device__ __forceinline__ Eight load_eight(const T* head, unsigned i, unsigned half) {
    using contract::load4;
    using narrow::load4;
    return {load4(head + i), load4(head + half + i)};
}
template <typename T>
__device__ __forceinline__ void store_eight(T* head, unsigned i, unsigned half, const Eight& x) {
    using contract::store4;
    using narrow::store4;
    store4(head + i, x.a);
    store4(head + half + i, x.b);
}

// --------------------------------------------------------------------------------------------- forward

template <typename H>
struct Forward {
    const H* qkv;
    const float* q_weight;
    const float* k_weight;
    const float* table;
    H* rotated;
    float* rstd;
    unsigned rows;
    unsigned seq_len;
    unsigned n_heads;
    unsigned n_kv_heads;
    unsigned head_dim;
    float eps;

    __device__ __forceinline__ unsigned heads() const { return n_heads + 2 * n_kv_heads; }
    __device__ __forceinline__ unsigned turned() const { return n_heads + n_kv_heads; }
};

__device__ __forceinline__ float rstd_of(float mean_square, float eps) {
    return __frcp_rn(__fsqrt_rn(__fadd_rn(mean_square, eps)));
}
__device__ __forceinline__ float scaled(float x, float rstd, float w) { return __fmul_rn(__fmul_rn(x, rstd), w); }

/// A block of 256 threads takes 256 / THREADS groups of heads.
template <unsigned THREADS, typename H>
__device__ __forceinline__ void norm_group(const Forward<H>& p) {
    constexpr unsigned D = 8 * THREADS, HALF = D / 2;
    const unsigned t = threadIdx.x % THREADS, i = 4 * t;
    const Group group(blockIdx.x * (256 / THREADS) + threadIdx.x / THREADS, p.rows, p.n_heads, p.n_kv_heads);
    const size_t at = ((size_t)group.row * p.heads() + group.head) * D;
    const H* from = p.qkv + at;
    H* to = p.rotated + at;
    Words words[HEADS];
#pragma unroll
    for (unsigned k = 0; k < HEADS; ++k) words[k] = k < group.count ? load_words(from + k * D, i, HALF) : Words{};
    if (__all_sync(contract::WHOLE_WARP, group.value)) {
#pragma unroll
        for (unsigned k = 0; k < HEADS; ++k)
            if (k < group.count) store_words(to + k * D, i, HALF, words[k]);
        return;
    }
    const Eight w = load_eight(group.key ? p.k_weight : p.q_weight, i, HALF);
    const Angles angle = load_angles(p.table + ((size_t)(group.row % p.seq_len) * HALF + i) * 2);
    float v[4 * HEADS];
#pragma unroll
    for (unsigned k = 0; k < HEADS; ++k) {
        const Eight x = widened<H>(words[k]);
        dot_step<THREADS>(x, x, v + 4 * k);
    }
    const float mine = rstd_of(over<D>(head_dots<THREADS>(v)), p.eps);
#pragma unroll
    for (unsigned k = 0; k < HEADS; ++k) {
        const float rstd = of_head<THREADS>(mine, k);
        if (!group.value) {
            Eight x = widened<H>(words[k]);
            x = {mul4(scale4(x.a, rstd), w.a), mul4(scale4(x.b, rstd), w.b)};
            turn4<false>(x, angle);
            words[k] = rounded<H>(x);
        }
        if (k < group.count) store_words(to + k * D, i, HALF, words[k]);
    }
    const unsigned k = t / (THREADS / HEADS);
    if (t % (THREADS / HEADS) == 0 && k < group.count && !group.value)
        p.rstd[(size_t)group.row * p.turned() + group.head + k] = mine;
}

/// Heads of any size at any address: a warp a head of a row.
template <typename H>
__device__ __forceinline__ void norm_any(const Forward<H>& p) {
    const unsigned lane = threadIdx.x & 31u, d = p.head_dim, half = d / 2;
    const unsigned unit = blockIdx.x * 8 + threadIdx.x / 32, row = unit / p.heads(), head = unit - row * p.heads();
    if (row >= p.rows) return;
    const H* x = p.qkv + (size_t)unit * d;
    H* out = p.rotated + (size_t)unit * d;
    if (head >= p.turned()) {
        for (unsigned i = lane; i < d; i += 32) out[i] = x[i];
        return;
    }
    const float* weight = head < p.n_heads ? p.q_weight : p.k_weight;
    const float* angle = p.table + (size_t)(row % p.seq_len) * half * 2;
    float lanes[8] = {};
    contract::for_strided(d, [&](unsigned i, int l) {
        const float v = narrow::widen(x[i]);
        lanes[l] = __fmaf_rn(v, v, lanes[l]);
    });
    const float rstd = rstd_of(__fdiv_rn(contract::fold_strided(lanes), __uint2float_rn(d)), p.eps);
    for (unsigned i = lane; i < half; i += 32) {
        float a = scaled(narrow::widen(x[i]), rstd, weight[i]), b = scaled(narrow::widen(x[i + half]), rstd, weight[i + half]);
        rope::turn<false>(a, b, angle[2 * i], angle[2 * i + 1]);
        out[i] = narrow::narrowed<H>(a);
        out[i + half] = narrow::narrowed<H>(b);
    }
    // The last element of an odd head has no partner.
    for (unsigned i = 2 * half + lane; i < d; i += 32)
        out[i] = narrow::narrowed<H>(scaled(narrow::widen(x[i]), rstd, weight[i]));
    if (lane == 0) p.rstd[(size_t)row * p.turned() + head] = rstd;
}

// -------------------------------------------------------------------------------------------- backward
//
// The inverse rotation of dqkv, then the norm's backward: with x = qkv * rstd, g = dh * weight and
// c = (sum g * x) / head_dim, dqkv = rstd * fma(-x, c, g); the weight gradients sum dh * x over tokens and, within
// a token, over the heads of a kind ascending. dh, which is never rounded, lives in registers or shared memory.

template <typename H>
struct Backward {
    const H* qkv;
    const float* q_weight;
    const float* k_weight;
    const float* table;
    const float* rstd;
    H* dqkv;
    float* dq_weight;
    float* dk_weight;
    contract::TokenCut cut;
    unsigned seq_len;
    unsigned n_heads;
    unsigned n_kv_heads;
    unsigned head_dim;
    /// Tokens that a block holds in shared memory at once.
    unsigned held;
    unsigned* counters;
    float* partials;

    __device__ __forceinline__ unsigned turned() const { return n_heads + n_kv_heads; }
    __device__ __forceinline__ size_t at(unsigned t, unsigned head) const {
        return ((size_t)t * (n_heads + 2 * n_kv_heads) + head) * head_dim;
    }
    __device__ __forceinline__ const float* weight(unsigned head) const { return head < n_heads ? q_weight : k_weight; }
    __device__ __forceinline__ float rstd_of(unsigned t, unsigned head) const { return rstd[(size_t)t * turned() + head]; }
    __device__ __forceinline__ const float* angles(unsigned t) const {
        return table + (size_t)(t % seq_len) * (head_dim / 2) * 2;
    }
};

__device__ __forceinline__ float input_gradient(float g, float x, float rstd, float c) {
    return __fmul_rn(rstd, __fmaf_rn(contract::negate(x), c, g));
}
__device__ __forceinline__ float4 input_gradient4(float4 g, float4 x, float rstd, float c) {
    return make_float4(input_gradient(g.x, x.x, rstd, c), input_gradient(g.y, x.y, rstd, c), input_gradient(g.z, x.z, rstd, c),
                       input_gradient(g.w, x.w, rstd, c));
}

/// One head of `present` groups of THREADS threads; dh and x go to shared memory where those are given.
template <unsigned THREADS, typename H>
__device__ __forceinline__ void group_head(const Backward<H>& p, unsigned t, unsigned head, bool present, float* dh_out, float* x_out) {
    constexpr unsigned D = 8 * THREADS, HALF = D / 2;
    const unsigned i = 4 * (threadIdx.x % THREADS);
    const size_t at = p.at(t, head);
    Eight dh = load_eight(p.dqkv + at, i, HALF), x = load_eight(p.qkv + at, i, HALF);
    const Eight w = load_eight(p.weight(head), i, HALF);
    const float rstd = p.rstd_of(t, head);
    turn4<true>(dh, load_angles(p.angles(t) + 2 * i));
    x = {scale4(x.a, rstd), scale4(x.b, rstd)};
    const Eight g = {mul4(dh.a, w.a), mul4(dh.b, w.b)};
    const float c = __fdiv_rn(head_dot<THREADS>(g, x), __uint2float_rn(D));
    if (!present) return;
    if (dh_out != nullptr) {
        store_eight(dh_out, i, HALF, dh);
        store_eight(x_out, i, HALF, x);
    }
    store_eight(p.dqkv + at, i, HALF, {input_gradient4(g.a, x.a, rstd, c), input_gradient4(g.b, x.b, rstd, c)});
}

/// Element i of the turned gradient of a head.
template <typename H>
__device__ __forceinline__ float turned_back(const H* from, const float* angle, unsigned i, unsigned half) {
    const unsigned pair = i < half ? i : i - half;
    if (i >= 2 * half) return narrow::widen(from[i]);
    float a = narrow::widen(from[pair]), b = narrow::widen(from[pair + half]);
    rope::turn<true>(a, b, angle[2 * pair], angle[2 * pair + 1]);
    return i < half ? a : b;
}

/// The same for a head of any size at any address, by one warp.
template <typename H>
__device__ __forceinline__ void any_head(const Backward<H>& p, unsigned t, unsigned head, float* dh_out, float* x_out) {
    const unsigned lane = threadIdx.x & 31u, d = p.head_dim, half = d / 2;
    H* dqkv = p.dqkv + p.at(t, head);
    const H* qkv = p.qkv + p.at(t, head);
    const float *weight = p.weight(head), *angle = p.angles(t);
    const float rstd = p.rstd_of(t, head);
    float lanes[8] = {};
    contract::for_strided(d, [&](unsigned i, int l) {
        const float dh = turned_back(dqkv, angle, i, half), x = __fmul_rn(narrow::widen(qkv[i]), rstd);
        lanes[l] = __fmaf_rn(__fmul_rn(dh, weight[i]), x, lanes[l]);
        if (dh_out != nullptr) {
            dh_out[i] = dh;
            x_out[i] = x;
        }
    });
    // Behind the fold every lane has read what the others now overwrite.
    const float c = __fdiv_rn(contract::fold_strided(lanes), __uint2float_rn(d));
    const auto finished = [&](unsigned i, float dh) {
        return narrow::narrowed<H>(input_gradient(__fmul_rn(dh, weight[i]), __fmul_rn(narrow::widen(qkv[i]), rstd), rstd, c));
    };
    __syncwarp(contract::WHOLE_WARP);
    for (unsigned i = lane; i < half; i += 32) {
        float a = narrow::widen(dqkv[i]), b = narrow::widen(dqkv[i + half]);
        rope::turn<true>(a, b, angle[2 * i], angle[2 * i + 1]);
        dqkv[i] = finished(i, a);
        dqkv[i + half] = finished(i + half, b);
    }
    for (unsigned i = 2 * half + lane; i < d; i += 32) dqkv[i] = finished(i, narrow::widen(dqkv[i]));
}

/// Every head of the tokens `first` .. `first + n`, by the block; dh and x of head u to dh[u], x[u] where given.
/// THREADS: threads of a head, or 0 for heads of any size.
template <unsigned THREADS, typename H>
__device__ __forceinline__ void block_heads(const Backward<H>& p, unsigned first, unsigned n, float* dh, float* x) {
    constexpr unsigned TOGETHER = THREADS > 0 ? THREADS : 32;
    const unsigned turned = p.turned(), d = p.head_dim, units = n * turned, groups = blockDim.x / TOGETHER;
    for (unsigned start = 0; start < units; start += groups) {
        const unsigned mine = start + threadIdx.x / TOGETHER;
        const unsigned u = mine < units ? mine : units - 1;
        const unsigned k = u / turned, head = u - k * turned;
        float *dh_at = dh == nullptr ? nullptr : dh + u * d, *x_at = dh == nullptr ? nullptr : x + u * d;
        if constexpr (THREADS > 0) group_head<THREADS>(p, first + k, head, mine < units, dh_at, x_at);
        else if (mine < units) any_head(p, first + k, head, dh_at, x_at);
    }
}

/// Without weight gradients: a block of 256 threads takes as many heads of rows as it has groups.
template <unsigned THREADS, typename H>
__device__ __forceinline__ void heads_alone(const Backward<H>& p) {
    constexpr unsigned TOGETHER = THREADS > 0 ? THREADS : 32;
    const unsigned turned = p.turned(), all = p.cut.tokens * turned;
    const unsigned mine = blockIdx.x * (256 / TOGETHER) + threadIdx.x / TOGETHER;
    const unsigned u = mine < all ? mine : all - 1, t = u / turned;
    if constexpr (THREADS > 0) group_head<THREADS>(p, t, u - t * turned, mine < all, nullptr, nullptr);
    else if (mine < all) any_head(p, t, u - t * turned, nullptr, nullptr);
}

/// A kind's heads.
template <typename H>
__device__ __forceinline__ unsigned kind_first(const Backward<H>& p, bool key) { return key ? p.n_heads : 0; }
template <typename H>
__device__ __forceinline__ unsigned kind_end(const Backward<H>& p, bool key) { return key ? p.turned() : p.n_heads; }

/// The chains of a piece over tokens that lie in shared memory; `partial` holds what went before.
template <typename H>
__device__ __forceinline__ void chains_from_shared(const Backward<H>& p, unsigned n, const float* dh, const float* x, bool begin,
                                                   float* partial) {
    const unsigned d = p.head_dim, turned = p.turned();
    for (unsigned c = threadIdx.x; c < 2 * d; c += blockDim.x) {
        const bool key = c >= d;
        const unsigned j = key ? c - d : c, first = kind_first(p, key), end = kind_end(p, key);
        float acc = begin ? 0.0f : partial[c];
        for (unsigned k = 0; k < n; ++k) {
#pragma unroll 8
            for (unsigned head = first; head < end; ++head) {
                const unsigned at = (k * turned + head) * d + j;
                acc = __fmaf_rn(dh[at], x[at], acc);
            }
        }
        partial[c] = acc;
    }
}

/// The same from memory, before dqkv is overwritten.
template <typename H>
__device__ __forceinline__ void chains_from_memory(const Backward<H>& p, unsigned first, unsigned end, float* partial) {
    const unsigned d = p.head_dim;
    for (unsigned c = threadIdx.x; c < 2 * d; c += blockDim.x) {
        const bool key = c >= d;
        const unsigned j = key ? c - d : c;
        float acc = 0.0f;
        for (unsigned t = first; t < end; ++t) {
            for (unsigned head = kind_first(p, key); head < kind_end(p, key); ++head) {
                const size_t at = p.at(t, head);
                const float x = __fmul_rn(narrow::widen(p.qkv[at + j]), p.rstd_of(t, head));
                acc = __fmaf_rn(turned_back(p.dqkv + at, p.angles(t), j, d / 2), x, acc);
            }
        }
        partial[c] = acc;
    }
}

/// With weight gradients: a block a piece. STAGED: dh and x of `held` tokens at once lie in shared memory.
template <unsigned THREADS, bool STAGED, typename H>
__device__ __forceinline__ void heads_and_weights(const Backward<H>& p) {
    extern __shared__ __align__(16) float shared[];
    const unsigned d = p.head_dim, per_grain = p.cut.pieces_per_grain();
    const unsigned grain = blockIdx.x / per_grain, piece = blockIdx.x % per_grain;
    if (piece >= p.cut.pieces(grain)) return;
    const unsigned first = p.cut.first(grain, piece), end = p.cut.end(grain, piece);
    float* partial = p.partials + (size_t)blockIdx.x * 2 * d;
    if (STAGED) {
        float *dh = shared, *x = shared + p.held * p.turned() * d;
        for (unsigned start = first; start < end; start += p.held) {
            const unsigned n = end - start < p.held ? end - start : p.held;
            block_heads<THREADS>(p, start, n, dh, x);
            __syncthreads();
            chains_from_shared(p, n, dh, x, start == first, partial);
            __syncthreads();
        }
    } else {
        chains_from_memory(p, first, end, partial);
        __syncthreads();
        block_heads<THREADS>(p, first, end - first, nullptr, nullptr);
    }
    contract::fold_rows(p.cut, contract::GroupRows{p.partials, 2 * d, p.counters}, 0, 2 * d, [&](unsigned j, float sum) {
        if (j < d) p.dq_weight[j] = sum;
        else p.dk_weight[j - d] = sum;
    });
}

}  // namespace heads

#define QK_NORM_ROPE_ENTRY(NAME, H, BODY)                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 4)                                                      \
    NAME(const narrow::H* __restrict__ qkv, const float* __restrict__ q_weight,                               \
         const float* __restrict__ k_weight, const float* __restrict__ table, narrow::H* __restrict__ rotated, \
         float* __restrict__ rstd, unsigned rows, unsigned seq_len, unsigned n_heads, unsigned n_kv_heads,    \
         unsigned head_dim, float eps) {                                                                      \
        heads::BODY(heads::Forward<narrow::H>{qkv, q_weight, k_weight, table, rotated, rstd, rows, seq_len,   \
                                              n_heads, n_kv_heads, head_dim, eps});                           \
    }

#define QK_NORM_ROPE_ENTRIES(H)                                                                               \
    QK_NORM_ROPE_ENTRY(qk_norm_rope_##H, H, norm_any)                                                         \
    QK_NORM_ROPE_ENTRY(qk_norm_rope_##H##_32, H, norm_group<4>)                                               \
    QK_NORM_ROPE_ENTRY(qk_norm_rope_##H##_64, H, norm_group<8>)                                               \
    QK_NORM_ROPE_ENTRY(qk_norm_rope_##H##_128, H, norm_group<16>)                                             \
    QK_NORM_ROPE_ENTRY(qk_norm_rope_##H##_256, H, norm_group<32>)

#define QK_NORM_ROPE_GRAD_WEIGHTS(NAME, H, THREADS, STAGED)                                                   \
    extern "C" __global__ void __launch_bounds__(512, 2)                                                      \
    NAME(const narrow::H* __restrict__ qkv, const float* __restrict__ q_weight,                               \
         const float* __restrict__ k_weight, const float* __restrict__ table, const float* __restrict__ rstd, \
         narrow::H* dqkv, float* dq_weight, float* dk_weight, unsigned tokens, unsigned grain, unsigned piece, \
         unsigned seq_len, unsigned n_heads, unsigned n_kv_heads, unsigned head_dim, unsigned held,           \
         unsigned* counters, float* partials) {                                                               \
        const contract::TokenCut cut{tokens, grain, piece, 1};                                                \
        heads::heads_and_weights<THREADS, STAGED>(heads::Backward<narrow::H>{                                 \
            qkv, q_weight, k_weight, table, rstd, dqkv, dq_weight, dk_weight, cut, seq_len, n_heads,          \
            n_kv_heads, head_dim, held, counters, partials});                                                 \
    }

#define QK_NORM_ROPE_GRAD_HEADS(NAME, H, THREADS)                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                         \
    NAME(const narrow::H* __restrict__ qkv, const float* __restrict__ q_weight,                               \
         const float* __restrict__ k_weight, const float* __restrict__ table, const float* __restrict__ rstd, \
         narrow::H* dqkv, unsigned rows, unsigned seq_len, unsigned n_heads, unsigned n_kv_heads,             \
         unsigned head_dim) {                                                                                 \
        heads::heads_alone<THREADS>(heads::Backward<narrow::H>{                                               \
            qkv, q_weight, k_weight, table, rstd, dqkv, nullptr, nullptr, {rows, rows, rows, 1}, seq_len,     \
            n_heads, n_kv_heads, head_dim, 0, nullptr, nullptr});                                             \
    }

#define QK_NORM_ROPE_GRAD_ENTRIES(H)                                                                          \
    QK_NORM_ROPE_GRAD_WEIGHTS(qk_norm_rope_grad_##H, H, 0, false)                                             \
    QK_NORM_ROPE_GRAD_WEIGHTS(qk_norm_rope_grad_##H##_staged, H, 0, true)                                     \
    QK_NORM_ROPE_GRAD_WEIGHTS(qk_norm_rope_grad_##H##_staged_32, H, 4, true)                                  \
    QK_NORM_ROPE_GRAD_WEIGHTS(qk_norm_rope_grad_##H##_staged_64, H, 8, true)                                  \
    QK_NORM_ROPE_GRAD_WEIGHTS(qk_norm_rope_grad_##H##_staged_128, H, 16, true)                                \
    QK_NORM_ROPE_GRAD_WEIGHTS(qk_norm_rope_grad_##H##_staged_256, H, 32, true)                                \
    QK_NORM_ROPE_GRAD_HEADS(qk_norm_rope_grad_##H##_heads, H, 0)                                              \
    QK_NORM_ROPE_GRAD_HEADS(qk_norm_rope_grad_##H##_heads_32, H, 4)                                           \
    QK_NORM_ROPE_GRAD_HEADS(qk_norm_rope_grad_##H##_heads_64, H, 8)                                           \
    QK_NORM_ROPE_GRAD_HEADS(qk_norm_rope_grad_##H##_heads_128, H, 16)                                         \
    QK_NORM_ROPE_GRAD_HEADS(qk_norm_rope_grad_##H##_heads_256, H, 32)
