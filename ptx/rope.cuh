// The rotation of one pair, forward and back, and its kernels over the query and key heads of all rows, which are
// stored in H: f32, bf16 or f16.
#pragma once
#include "contract.cuh"
#include "storage.cuh"

namespace rope {

/// (a, b) -> (a * cos - b * sin, b * cos + a * sin), or with INVERSE back.
template <bool INVERSE>
__device__ __forceinline__ void turn(float& a, float& b, float cos, float sin) {
    const float x = a, y = b;
    const float ys = __fmul_rn(y, sin), xs = __fmul_rn(x, sin);
    a = __fmaf_rn(x, cos, INVERSE ? ys : contract::negate(ys));
    b = __fmaf_rn(y, cos, INVERSE ? contract::negate(xs) : xs);
}

template <typename H>
struct Params {
    /// For each position head_dim / 2 pairs of cosine and sine.
    const float* table;
    H* qkv;
    unsigned rows;
    unsigned seq_len;
    /// Query and key heads.
    unsigned rotated;
    unsigned head_dim;
    /// Columns of a row of qkv.
    unsigned columns;
    unsigned steps;
};

/// Heads of a thread, which have the same angles.
constexpr unsigned HEADS = 4;

/// In place. A block of 32 x 8 threads serves a run of 8 * `steps` rows; a thread has, in each of its rows, one pair
/// (or as many as fill 16 bytes twice) of every `apart`-th head.
template <bool INVERSE, bool VECTORS, typename H>
__device__ __forceinline__ void turn_rows(const Params<H>& p) {
    constexpr unsigned N = VECTORS ? storage::Vector<H>::N : 1;
    const unsigned half = p.head_dim / 2, units = half / N, apart = (p.rotated + HEADS - 1) / HEADS;
    const unsigned u = blockIdx.y * 32 + threadIdx.x;
    if (u >= apart * units) return;
    const unsigned head = u / units, i = (u - head * units) * N;
    unsigned row = blockIdx.x * 8 * p.steps + threadIdx.y;
    for (unsigned s = 0; s < p.steps && row < p.rows; ++s, row += 8) {
        H* at = p.qkv + (size_t)row * p.columns + head * p.head_dim + i;
        const float* angle = p.table + ((size_t)(row % p.seq_len) * half + i) * 2;
        if constexpr (VECTORS) {
            uint4 a_words[HEADS], b_words[HEADS];
#pragma unroll
            for (unsigned k = 0; k < HEADS; ++k) {
                if (head + k * apart >= p.rotated) continue;
                a_words[k] = storage::load_words(at + k * apart * p.head_dim);
                b_words[k] = storage::load_words(at + k * apart * p.head_dim + half);
            }
            float4 two[N / 2];
#pragma unroll
            for (unsigned k = 0; k < N / 2; ++k) two[k] = contract::load4(angle + 4 * k);
#pragma unroll
            for (unsigned k = 0; k < HEADS; ++k) {
                if (head + k * apart >= p.rotated) continue;
                storage::Vector<H> a(a_words[k]), b(b_words[k]);
#pragma unroll
                for (unsigned j = 0; j < N / 2; ++j) {
                    turn<INVERSE>(a.v[2 * j], b.v[2 * j], two[j].x, two[j].y);
                    turn<INVERSE>(a.v[2 * j + 1], b.v[2 * j + 1], two[j].z, two[j].w);
                }
                storage::store_vector(at + k * apart * p.head_dim, a);
                storage::store_vector(at + k * apart * p.head_dim + half, b);
            }
        } else {
            for (unsigned k = head; k < p.rotated; k += apart, at += (size_t)apart * p.head_dim) {
                float a = storage::widen(at[0]), b = storage::widen(at[half]);
                turn<INVERSE>(a, b, angle[0], angle[1]);
                at[0] = storage::narrowed<H>(a);
                at[half] = storage::narrowed<H>(b);
            }
        }
    }
}

}  // namespace rope

#define ROPE_ENTRY(NAME, H, INVERSE, VECTORS)                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                                         \
    NAME(const float* __restrict__ table, storage::H* __restrict__ qkv, unsigned rows, unsigned seq_len,      \
         unsigned rotated, unsigned head_dim, unsigned columns, unsigned steps) {                             \
        rope::turn_rows<INVERSE, VECTORS>(                                                                    \
            rope::Params<storage::H>{table, qkv, rows, seq_len, rotated, head_dim, columns, steps});          \
    }
