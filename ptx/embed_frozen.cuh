// x[t] = table[ids[t]] from a table stored in 16 bits: a warp a row.
#pragma once
#include "contract.cuh"
#include "narrow.cuh"

// A row whose id lies outside the table becomes NaN: it reads nothing, and the step is refused.
template <class H, bool OCTETS>
__device__ __forceinline__ void embed_frozen(const int* __restrict__ ids, const H* __restrict__ table,
                                             float* __restrict__ x, unsigned rows, unsigned vocab, unsigned d) {
    const unsigned row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const unsigned id = (unsigned)ids[row];
    float* to = x + (size_t)row * d;
    if (id >= vocab) {
        for (unsigned i = lane; i < d; i += 32) to[i] = contract::from_bits(contract::NAN_BITS);
        return;
    }
    const H* from = table + (size_t)id * d;
    if (OCTETS) {
#pragma unroll 4
        for (unsigned i = 8 * lane; i < d; i += 256) {
            const narrow::Octet octet = narrow::load8(from + i);
            contract::store4(to + i, make_float4(octet.v[0], octet.v[1], octet.v[2], octet.v[3]));
            contract::store4(to + i + 4, make_float4(octet.v[4], octet.v[5], octet.v[6], octet.v[7]));
        }
    } else {
#pragma unroll 8
        for (unsigned i = lane; i < d; i += 32) to[i] = narrow::widen(from[i]);
    }
}

#define EMBED_FROZEN(STORAGE, ELEMENT)                                                                           \
    extern "C" __global__ void __launch_bounds__(128)                                                            \
        embed_frozen_##STORAGE(const int* ids, const ELEMENT* table, float* x, unsigned rows, unsigned vocab,    \
                               unsigned d) {                                                                     \
        embed_frozen<ELEMENT, false>(ids, table, x, rows, vocab, d);                                             \
    }                                                                                                            \
    extern "C" __global__ void __launch_bounds__(128)                                                            \
        embed_frozen_##STORAGE##_octets(const int* ids, const ELEMENT* table, float* x, unsigned rows,           \
                                        unsigned vocab, unsigned d) {                                            \
        embed_frozen<ELEMENT, true>(ids, table, x, rows, vocab, d);                                              \
    }
