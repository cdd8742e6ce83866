// The rotation of one pair, forward and back, and its kernels over the query and key heads of all rows, which are
// stored in H: f32, bf16 or f16.
#pragma once
#include "contract.cuh"
#include "quads.cuh"
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
};

/// Heads of a thread, which have the same angles.
constexpr unsigned HEADS = 4;

/// In place. A thread has one pair or, with QUADS, four of every `apart`-th head of a row; as many as blockDim.x threads
/// serve a head's pairs, so that none is idle beside a narrow row.
template <bool INVERSE, bool QUADS, typename H>
__device__ __forceinline__ void turn_rows(const Params<H>& p) {
    constexpr unsigned N = QUADS ? 4 : 1;
    const unsigned half = p.head_dim / 2, apart = (p.rotated + HEADS - 1) / HEADS;
    const unsigned unit = blockIdx.x * blockDim.y + threadIdx.y, row = unit / apart, head = unit - row * apart;
    if (row >= p.rows) return;
    const size_t step = (size_t)apart * p.head_dim;
    H* heads = p.qkv + (size_t)row * p.columns + (size_t)head * p.head_dim;
    const float* angles = p.table + (size_t)(row % p.seq_len) * half * 2;
    for (unsigned i = threadIdx.x * N; i < half; i += blockDim.x * N) {
        H* at = heads + i;
        const float* angle = angles + 2 * i;
        if constexpr (QUADS) {
            quads::Stored<H> a_words[HEADS], b_words[HEADS];
#pragma unroll
            for (unsigned k = 0; k < HEADS; ++k) {
                if (head + k * apart >= p.rotated) continue;
                a_words[k] = quads::fetch(at + k * step, 4, true);
                b_words[k] = quads::fetch(at + k * step + half, 4, true);
            }
            const float4 first = contract::load4(angle), second = contract::load4(angle + 4);
#pragma unroll
            for (unsigned k = 0; k < HEADS; ++k) {
                if (head + k * apart >= p.rotated) continue;
                quads::Quad a = quads::widen<H>(a_words[k]), b = quads::widen<H>(b_words[k]);
                turn<INVERSE>(a.v[0], b.v[0], first.x, first.y);
                turn<INVERSE>(a.v[1], b.v[1], first.z, first.w);
                turn<INVERSE>(a.v[2], b.v[2], second.x, second.y);
                turn<INVERSE>(a.v[3], b.v[3], second.z, second.w);
                quads::put(at + k * step, a, 4, true);
                quads::put(at + k * step + half, b, 4, true);
            }
        } else {
            for (unsigned k = head; k < p.rotated; k += apart, at += step) {
                float a = storage::widen(at[0]), b = storage::widen(at[half]);
                turn<INVERSE>(a, b, angle[0], angle[1]);
                at[0] = storage::narrowed<H>(a);
                at[half] = storage::narrowed<H>(b);
            }
        }
    }
}

}  // namespace rope

#define ROPE_ENTRY(NAME, H, INVERSE, QUADS)                                                                   \
    extern "C" __global__ void __launch_bounds__(256, 4)                                                      \
    NAME(const float* __restrict__ table, storage::H* __restrict__ qkv, unsigned rows, unsigned seq_len,      \
         unsigned rotated, unsigned head_dim, unsigned columns) {                                             \
        rope::turn_rows<INVERSE, QUADS>(                                                                      \
            rope::Params<storage::H>{table, qkv, rows, seq_len, rotated, head_dim, columns});                 \
    }
