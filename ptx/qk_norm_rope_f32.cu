// The RMS norm of each query and key head with the weight of its kind, then the rotation; values are copied.
// A warp a head of a row.
#include "rope.cuh"

using namespace contract;

struct Params {
    const float* qkv;
    const float* q_weight;
    const float* k_weight;
    const float* table;
    float* rotated;
    float* rstd;
    unsigned rows;
    unsigned seq_len;
    unsigned n_heads;
    unsigned n_kv_heads;
    unsigned head_dim;
    float eps;
};

__device__ __forceinline__ float row_rstd(float squares, unsigned d, float eps) {
    return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(squares, __uint2float_rn(d)), eps)));
}

__device__ __forceinline__ float scaled(float x, float rstd, float w) { return __fmul_rn(__fmul_rn(x, rstd), w); }

/// HELD: elements of a head that a thread keeps in registers, where head_dim is 32 * HELD and HELD is even, so
/// that both halves of a pair lie in one thread; 0 for any head_dim.
template <int HELD>
__device__ __forceinline__ void norm_head(const Params& p) {
    const unsigned lane = threadIdx.x & 31u, d = HELD > 0 ? 32 * HELD : p.head_dim, half = d / 2;
    const unsigned heads = p.n_heads + 2 * p.n_kv_heads, turned = p.n_heads + p.n_kv_heads;
    const unsigned unit = blockIdx.x * 8 + threadIdx.x / 32, row = unit / heads, head = unit - row * heads;
    if (row >= p.rows) return;
    const size_t start = ((size_t)row * heads + head) * d;
    const float* x = p.qkv + start;
    float* out = p.rotated + start;
    if (head >= turned) {
#pragma unroll 4
        for (unsigned i = lane; i < d; i += 32) out[i] = x[i];
        return;
    }
    const float* weight = head < p.n_heads ? p.q_weight : p.k_weight;
    const float* angle = p.table + (size_t)(row % p.seq_len) * half * 2;
    float rstd;
    if constexpr (HELD > 0) {
        float v[HELD], w[HELD];
        float2 cs[HELD / 2];
        float lanes[8] = {};
#pragma unroll
        for (int k = 0; k < HELD; ++k) v[k] = x[lane + 32 * k], w[k] = weight[lane + 32 * k];
#pragma unroll
        for (int k = 0; k < HELD / 2; ++k) cs[k] = make_float2(angle[2 * (lane + 32 * k)], angle[2 * (lane + 32 * k) + 1]);
#pragma unroll
        for (int k = 0; k < HELD; ++k) lanes[k] = __fmaf_rn(v[k], v[k], lanes[k]);
        rstd = row_rstd(fold_strided(lanes), d, p.eps);
#pragma unroll
        for (int k = 0; k < HELD / 2; ++k) {
            float a = scaled(v[k], rstd, w[k]), b = scaled(v[k + HELD / 2], rstd, w[k + HELD / 2]);
            rope::turn<false>(a, b, cs[k].x, cs[k].y);
            out[lane + 32 * k] = a;
            out[lane + 32 * k + half] = b;
        }
    } else {
        rstd = row_rstd(row_sum_of_squares<false>(x, d), d, p.eps);
        for (unsigned i = lane; i < half; i += 32) {
            float a = scaled(x[i], rstd, weight[i]), b = scaled(x[i + half], rstd, weight[i + half]);
            rope::turn<false>(a, b, angle[2 * i], angle[2 * i + 1]);
            out[i] = a;
            out[i + half] = b;
        }
        // The last element of an odd head has no partner.
        for (unsigned i = 2 * half + lane; i < d; i += 32) out[i] = scaled(x[i], rstd, weight[i]);
    }
    if (lane == 0) p.rstd[(size_t)row * turned + head] = rstd;
}

#define ENTRY(NAME, HELD)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256)                                                         \
    NAME(const float* __restrict__ qkv, const float* __restrict__ q_weight, const float* __restrict__ k_weight, \
         const float* __restrict__ table, float* __restrict__ rotated, float* __restrict__ rstd, unsigned rows, \
         unsigned seq_len, unsigned n_heads, unsigned n_kv_heads, unsigned head_dim, float eps) {             \
        norm_head<HELD>(Params{qkv, q_weight, k_weight, table, rotated, rstd, rows, seq_len, n_heads,         \
                               n_kv_heads, head_dim, eps});                                                   \
    }

ENTRY(qk_norm_rope_f32, 0)
ENTRY(qk_norm_rope_f32_64, 2)
ENTRY(qk_norm_rope_f32_128, 4)
ENTRY(qk_norm_rope_f32_256, 8)
