// The inverse rotation of dqkv, then the norm's backward in place: with x = qkv * rstd, g = dh * weight and
// c = (sum g * x) / head_dim, dqkv = rstd * fma(-x, c, g); the weight gradients sum dh * x over tokens and, within
// a token, over the heads of a kind ascending. A block a piece: its warps take heads, its threads the columns of
// the weight chains, and the last block folds the pieces.
#include "rope.cuh"

using namespace contract;

struct Params {
    const float* qkv;
    const float* q_weight;
    const float* k_weight;
    const float* table;
    const float* rstd;
    float* dqkv;
    float* dq_weight;
    float* dk_weight;
    TokenCut cut;
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
};

/// Turns the head's gradient back in place by one warp.
__device__ __forceinline__ void turn_back(const Params& p, unsigned t, float* dh) {
    const unsigned half = p.head_dim / 2;
    const float* angle = p.table + (size_t)(t % p.seq_len) * half * 2;
    for (unsigned i = threadIdx.x & 31u; i < half; i += 32) {
        float a = dh[i], b = dh[i + half];
        rope::turn<true>(a, b, angle[2 * i], angle[2 * i + 1]);
        dh[i] = a;
        dh[i + half] = b;
    }
}

/// Turns the head's gradient back into `dh` and leaves `x` beside it, by one warp.
__device__ __forceinline__ void stage_head(const Params& p, unsigned t, unsigned head, float* dh, float* x) {
    const unsigned lane = threadIdx.x & 31u, d = p.head_dim, half = d / 2;
    const float *from = p.dqkv + p.at(t, head), *qkv = p.qkv + p.at(t, head);
    const float* angle = p.table + (size_t)(t % p.seq_len) * half * 2;
    const float rstd = p.rstd[(size_t)t * p.turned() + head];
#pragma unroll 4
    for (unsigned i = lane; i < half; i += 32) {
        float a = from[i], b = from[i + half];
        const float x0 = qkv[i], x1 = qkv[i + half];
        rope::turn<true>(a, b, angle[2 * i], angle[2 * i + 1]);
        dh[i] = a;
        dh[i + half] = b;
        x[i] = __fmul_rn(x0, rstd);
        x[i + half] = __fmul_rn(x1, rstd);
    }
    for (unsigned i = 2 * half + lane; i < d; i += 32) {
        dh[i] = from[i];
        x[i] = __fmul_rn(qkv[i], rstd);
    }
}

/// The norm's backward of one head by one warp; `x_at(i)` gives x.
template <typename X>
__device__ __forceinline__ void norm_back(const Params& p, unsigned t, unsigned head, const float* dh, X x_at) {
    const unsigned lane = threadIdx.x & 31u, d = p.head_dim;
    const float* weight = p.weight(head);
    const float rstd = p.rstd[(size_t)t * p.turned() + head];
    float* out = p.dqkv + p.at(t, head);
    float lanes[8] = {};
    for_strided(d, [&](unsigned i, int l) { lanes[l] = __fmaf_rn(__fmul_rn(dh[i], weight[i]), x_at(i), lanes[l]); });
    const float c = __fdiv_rn(fold_strided(lanes), __uint2float_rn(d));
#pragma unroll 4
    for (unsigned i = lane; i < d; i += 32)
        out[i] = __fmul_rn(rstd, __fmaf_rn(negate(x_at(i)), c, __fmul_rn(dh[i], weight[i])));
}

/// A kind's heads.
__device__ __forceinline__ unsigned kind_first(const Params& p, bool key) { return key ? p.n_heads : 0; }
__device__ __forceinline__ unsigned kind_end(const Params& p, bool key) { return key ? p.turned() : p.n_heads; }

/// Without weight gradients: a warp a head of a row. Each of these loops leaves an element to the thread that
/// the next one reads it with, but for the partners of a pair.
__device__ __forceinline__ void heads_alone(const Params& p) {
    const unsigned unit = blockIdx.x * 8 + threadIdx.x / 32, turned = p.turned();
    const unsigned t = unit / turned, head = unit - t * turned;
    if (t >= p.cut.tokens) return;
    float* dh = p.dqkv + p.at(t, head);
    turn_back(p, t, dh);
    __syncwarp(WHOLE_WARP);
    const float* qkv = p.qkv + p.at(t, head);
    const float rstd = p.rstd[(size_t)t * turned + head];
    norm_back(p, t, head, dh, [&](unsigned i) { return __fmul_rn(qkv[i], rstd); });
}

/// The chains of a piece over tokens that lie in shared memory; `partial` holds what went before.
__device__ __forceinline__ void chains_from_shared(const Params& p, unsigned n, const float* dh, const float* x, bool begin, float* partial) {
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

__device__ __forceinline__ void chains_from_memory(const Params& p, unsigned first, unsigned end, float* partial) {
    const unsigned d = p.head_dim, turned = p.turned();
    for (unsigned c = threadIdx.x; c < 2 * d; c += blockDim.x) {
        const bool key = c >= d;
        const unsigned j = key ? c - d : c;
        float acc = 0.0f;
        for (unsigned t = first; t < end; ++t) {
#pragma unroll 4
            for (unsigned head = kind_first(p, key); head < kind_end(p, key); ++head) {
                const size_t at = p.at(t, head) + j;
                acc = __fmaf_rn(p.dqkv[at], __fmul_rn(p.qkv[at], p.rstd[(size_t)t * turned + head]), acc);
            }
        }
        partial[c] = acc;
    }
}

template <bool STAGED>
__device__ __forceinline__ void heads_and_weights(const Params& p) {
    extern __shared__ __align__(16) float shared[];
    const unsigned warps = blockDim.x / 32, warp = threadIdx.x / 32, d = p.head_dim, turned = p.turned();
    const unsigned per_grain = p.cut.pieces_per_grain();
    const unsigned grain = blockIdx.x / per_grain, piece = blockIdx.x % per_grain;
    if (piece >= p.cut.pieces(grain)) return;
    const unsigned first = p.cut.first(grain, piece), end = p.cut.end(grain, piece);
    float* partial = p.partials + (size_t)blockIdx.x * 2 * d;
    if (STAGED) {
        float *dh = shared, *x = shared + p.held * turned * d;
        for (unsigned start = first; start < end; start += p.held) {
            const unsigned n = end - start < p.held ? end - start : p.held;
            for (unsigned u = warp; u < n * turned; u += warps) {
                const unsigned k = u / turned, head = u - k * turned;
                stage_head(p, start + k, head, dh + u * d, x + u * d);
                __syncwarp(WHOLE_WARP);
                norm_back(p, start + k, head, dh + u * d, [&](unsigned i) { return x[u * d + i]; });
            }
            __syncthreads();
            chains_from_shared(p, n, dh, x, start == first, partial);
            __syncthreads();
        }
    } else {
        const unsigned units = (end - first) * turned;
        for (unsigned u = warp; u < units; u += warps) turn_back(p, first + u / turned, p.dqkv + p.at(first + u / turned, u % turned));
        __syncthreads();
        chains_from_memory(p, first, end, partial);
        __syncthreads();
        for (unsigned u = warp; u < units; u += warps) {
            const unsigned t = first + u / turned, head = u % turned;
            const float* qkv = p.qkv + p.at(t, head);
            const float rstd = p.rstd[(size_t)t * turned + head];
            norm_back(p, t, head, p.dqkv + p.at(t, head), [&](unsigned i) { return __fmul_rn(qkv[i], rstd); });
        }
    }
    fold_rows(p.cut, GroupRows{p.partials, 2 * d, p.counters}, 0, 2 * d, [&](unsigned j, float sum) {
        if (j < d) p.dq_weight[j] = sum;
        else p.dk_weight[j - d] = sum;
    });
}

#define WEIGHTS(NAME, STAGED)                                                                                 \
    extern "C" __global__ void __launch_bounds__(512, 2)                                                      \
    NAME(const float* __restrict__ qkv, const float* __restrict__ q_weight, const float* __restrict__ k_weight, \
         const float* __restrict__ table, const float* __restrict__ rstd, float* dqkv, float* dq_weight,      \
         float* dk_weight, unsigned tokens, unsigned grain, unsigned piece, unsigned seq_len,                 \
         unsigned n_heads, unsigned n_kv_heads, unsigned head_dim, unsigned held, unsigned* counters,         \
         float* partials) {                                                                                   \
        const TokenCut cut{tokens, grain, piece, 1};                                                          \
        heads_and_weights<STAGED>(Params{qkv, q_weight, k_weight, table, rstd, dqkv, dq_weight, dk_weight,    \
                                         cut, seq_len, n_heads, n_kv_heads, head_dim, held, counters, partials}); \
    }

WEIGHTS(qk_norm_rope_grad_f32, false)
WEIGHTS(qk_norm_rope_grad_f32_staged, true)

extern "C" __global__ void __launch_bounds__(256)
qk_norm_rope_grad_f32_heads(const float* __restrict__ qkv, const float* __restrict__ q_weight,
                            const float* __restrict__ k_weight, const float* __restrict__ table,
                            const float* __restrict__ rstd, float* dqkv, unsigned rows, unsigned seq_len,
                            unsigned n_heads, unsigned n_kv_heads, unsigned head_dim) {
    heads_alone(Params{qkv, q_weight, k_weight, table, rstd, dqkv, nullptr, nullptr, {rows, rows, rows, 1}, seq_len,
                       n_heads, n_kv_heads, head_dim, 0, nullptr, nullptr});
}
