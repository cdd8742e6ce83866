// The rotation of pairs that are stored in H: in place over the query and key heads of all rows, forward and back.
#pragma once
#include "narrow.cuh"
#include "rope.cuh"

namespace rope_narrow {

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

/// A block of 32 x 8 threads serves 32 pairs (or octets of pairs) of a row and a run of 8 * `steps` rows.
template <bool INVERSE, bool OCTETS, typename H>
__device__ __forceinline__ void turn_rows(const Params<H>& p) {
    constexpr unsigned N = OCTETS ? 8 : 1;
    const unsigned half = p.head_dim / 2, units = half / N;
    const unsigned u = blockIdx.y * 32 + threadIdx.x;
    if (u >= p.rotated * units) return;
    const unsigned head = u / units, i = (u - head * units) * N;
    unsigned row = blockIdx.x * 8 * p.steps + threadIdx.y;
    for (unsigned s = 0; s < p.steps && row < p.rows; ++s, row += 8) {
        H* at = p.qkv + (size_t)row * p.columns + head * p.head_dim + i;
        const float* angle = p.table + ((size_t)(row % p.seq_len) * half + i) * 2;
        if constexpr (OCTETS) {
            narrow::Octet a = narrow::load8(at), b = narrow::load8(at + half);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float4 two = contract::load4(angle + 4 * k);
                rope::turn<INVERSE>(a.v[2 * k], b.v[2 * k], two.x, two.y);
                rope::turn<INVERSE>(a.v[2 * k + 1], b.v[2 * k + 1], two.z, two.w);
            }
            narrow::store8(at, a);
            narrow::store8(at + half, b);
        } else {
            float a = narrow::widen(at[0]), b = narrow::widen(at[half]);
            rope::turn<INVERSE>(a, b, angle[0], angle[1]);
            at[0] = narrow::narrowed<H>(a);
            at[half] = narrow::narrowed<H>(b);
        }
    }
}

}  // namespace rope_narrow

#define ROPE_NARROW_ENTRY(NAME, H, INVERSE, OCTETS)                                                           \
    extern "C" __global__ void __launch_bounds__(256)                                                         \
    NAME(const float* __restrict__ table, narrow::H* __restrict__ qkv, unsigned rows, unsigned seq_len,       \
         unsigned rotated, unsigned head_dim, unsigned columns, unsigned steps) {                             \
        rope_narrow::turn_rows<INVERSE, OCTETS>(rope_narrow::Params<narrow::H>{table, qkv, rows, seq_len,     \
                                                                               rotated, head_dim, columns, steps}); \
    }
