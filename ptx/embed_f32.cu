// x[t] = table[ids[t]]: a warp a row.
#include "contract.cuh"

using namespace contract;

/// A row whose id lies outside the table becomes NaN: it reads nothing, and the step is refused.
template <bool QUADS>
__device__ __forceinline__ void embed(const int* __restrict__ ids, const float* __restrict__ table,
                                      float* __restrict__ x, unsigned rows, unsigned vocab, unsigned d) {
    const unsigned row = blockIdx.x * 4 + threadIdx.x / 32;
    if (row >= rows) return;
    const unsigned id = (unsigned)ids[row];
    float* to = x + (size_t)row * d;
    if (id >= vocab) {
        for (unsigned i = threadIdx.x & 31u; i < d; i += 32) to[i] = from_bits(NAN_BITS);
        return;
    }
    const float* from = table + (size_t)id * d;
    if (QUADS) {
#pragma unroll 8
        for (unsigned i = 4 * (threadIdx.x & 31u); i < d; i += 128) store4(to + i, load4(from + i));
    } else {
#pragma unroll 8
        for (unsigned i = threadIdx.x & 31u; i < d; i += 32) to[i] = from[i];
    }
}

extern "C" __global__ void __launch_bounds__(128)
embed_f32(const int* ids, const float* table, float* x, unsigned rows, unsigned vocab, unsigned d) {
    embed<false>(ids, table, x, rows, vocab, d);
}

extern "C" __global__ void __launch_bounds__(128)
embed_f32_quads(const int* ids, const float* table, float* x, unsigned rows, unsigned vocab, unsigned d) {
    embed<true>(ids, table, x, rows, vocab, d);
}
