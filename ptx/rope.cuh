// The rotation of one pair, forward and back, and its kernel over the query and key heads of all rows.
#pragma once
#include "contract.cuh"

namespace rope {

/// (a, b) -> (a * cos - b * sin, b * cos + a * sin), or with INVERSE back.
template <bool INVERSE>
__device__ __forceinline__ void turn(float& a, float& b, float cos, float sin) {
    const float x = a, y = b;
    const float ys = __fmul_rn(y, sin), xs = __fmul_rn(x, sin);
    a = __fmaf_rn(x, cos, INVERSE ? ys : contract::negate(ys));
    b = __fmaf_rn(y, cos, INVERSE ? contract::negate(xs) : xs);
}

struct Params {
    /// For each position head_dim / 2 pairs of cosine and sine.
    const float* table;
    float* qkv;
    unsigned rows;
    unsigned seq_len;
    /// Query and key heads.
    unsigned rotated;
    unsigned head_dim;
    /// Columns of a row of qkv.
    unsigned columns;
    unsigned steps;
};

/// In place. A block of 32 x 8 threads serves 32 pairs (or quads of pairs) of a row and a run of 8 * `steps` rows.
template <bool INVERSE, bool QUADS>
__device__ __forceinline__ void turn_rows(const Params& p) {
    constexpr unsigned N = QUADS ? 4 : 1;
    const unsigned half = p.head_dim / 2, units = half / N;
    const unsigned u = blockIdx.y * 32 + threadIdx.x;
    if (u >= p.rotated * units) return;
    const unsigned head = u / units, i = (u - head * units) * N;
    unsigned row = blockIdx.x * 8 * p.steps + threadIdx.y;
    for (unsigned s = 0; s < p.steps && row < p.rows; ++s, row += 8) {
        float* at = p.qkv + (size_t)row * p.columns + head * p.head_dim + i;
        const float* angle = p.table + ((size_t)(row % p.seq_len) * half + i) * 2;
        if constexpr (QUADS) {
            float4 a = contract::load4(at), b = contract::load4(at + half);
            const float4 first = contract::load4(angle), second = contract::load4(angle + 4);
            turn<INVERSE>(a.x, b.x, first.x, first.y);
            turn<INVERSE>(a.y, b.y, first.z, first.w);
            turn<INVERSE>(a.z, b.z, second.x, second.y);
            turn<INVERSE>(a.w, b.w, second.z, second.w);
            contract::store4(at, a);
            contract::store4(at + half, b);
        } else {
            float a = at[0], b = at[half];
            turn<INVERSE>(a, b, angle[0], angle[1]);
            at[0] = a;
            at[half] = b;
        }
    }
}

}  // namespace rope

#define ROPE_ENTRY(NAME, INVERSE, QUADS)                                                                      \
    extern "C" __global__ void __launch_bounds__(256)                                                         \
    NAME(const float* __restrict__ table, float* __restrict__ qkv, unsigned rows, unsigned seq_len,           \
         unsigned rotated, unsigned head_dim, unsigned columns, unsigned steps) {                             \
        rope::turn_rows<INVERSE, QUADS>(rope::Params{table, qkv, rows, seq_len, rotated, head_dim, columns, steps}); \
    }
