// Weights stored as NF4: weight[i] = code(packed, i) * maxima[i / 64], rounded to binary32, then to the storage.
//
// Two codes a byte, the earlier element in the upper half. The code's values are those of src/num/nf4.rs, bit for
// bit.
#pragma once
#include "contract.cuh"
#include "narrow.cuh"

constexpr unsigned NF4_BLOCK = 64, NF4_THREADS = 256;

// Units of eight elements that a thread serves.
constexpr unsigned NF4_UNITS = 4;

// The sixteen values in as many banks of shared memory, so that whatever codes a warp has, it reads them at once.
__device__ __forceinline__ void nf4_code(float (&code)[16]) {
    const unsigned bits[16] = {0xbf800000, 0xbf3239b1, 0xbf066b30, 0xbeca32a0, 0xbe91a24d, 0xbe3d353f,
                               0xbdba7871, 0x00000000, 0x3da2faff, 0x3e24cae3, 0x3e7c04dd, 0x3ead033a,
                               0x3ee1a4b8, 0x3f1007ab, 0x3f3913b3, 0x3f800000};
    if (threadIdx.x < 16) {
#pragma unroll
        for (unsigned i = 0; i < 16; ++i) {
            if (threadIdx.x == i) code[i] = __uint_as_float(bits[i]);
        }
    }
    __syncthreads();
}

__device__ __forceinline__ void store_octet(float* to, const narrow::Octet& x) {
    contract::store4(to, make_float4(x.v[0], x.v[1], x.v[2], x.v[3]));
    contract::store4(to + 4, make_float4(x.v[4], x.v[5], x.v[6], x.v[7]));
}
template <class H> __device__ __forceinline__ void store_octet(H* to, const narrow::Octet& x) { narrow::store8(to, x); }

__device__ __forceinline__ void store_one(float* to, float x) { *to = x; }
template <class H> __device__ __forceinline__ void store_one(H* to, float x) { *to = narrow::narrowed<H>(x); }

// Eight elements a unit; `elements` is a multiple of 8, and all operands start at multiples of 16 bytes.
template <class Element>
__device__ __forceinline__ void nf4_octets(const unsigned* packed, const float* maxima, Element* weight,
                                           unsigned elements) {
    __shared__ float code[16];
    nf4_code(code);
    const unsigned units = elements / 8, first = blockIdx.x * NF4_THREADS * NF4_UNITS + threadIdx.x;
    unsigned words[NF4_UNITS];
    float scales[NF4_UNITS];
#pragma unroll
    for (unsigned u = 0; u < NF4_UNITS; ++u) {
        const unsigned unit = first + u * NF4_THREADS;
        words[u] = unit < units ? packed[unit] : 0;
        scales[u] = unit < units ? maxima[unit / (NF4_BLOCK / 8)] : 0.0f;
    }
#pragma unroll
    for (unsigned u = 0; u < NF4_UNITS; ++u) {
        const unsigned unit = first + u * NF4_THREADS;
        if (unit >= units) continue;
        narrow::Octet octet;
#pragma unroll
        for (unsigned e = 0; e < 8; ++e) {
            const unsigned shift = e / 2 * 8 + (e % 2 == 0 ? 4 : 0);
            octet.v[e] = __fmul_rn(code[words[u] >> shift & 15u], scales[u]);
        }
        store_octet(weight + (size_t)unit * 8, octet);
    }
}

// A thread an element, whatever the alignment.
template <class Element>
__device__ __forceinline__ void nf4_any(const unsigned char* packed, const float* maxima, Element* weight,
                                        unsigned elements) {
    __shared__ float code[16];
    nf4_code(code);
    const unsigned i = blockIdx.x * NF4_THREADS + threadIdx.x;
    if (i >= elements) return;
    const unsigned byte = packed[i / 2], four = i % 2 == 0 ? byte >> 4 : byte & 15u;
    store_one(weight + i, __fmul_rn(code[four], maxima[i / NF4_BLOCK]));
}

#define NF4_DEQUANTISE(STORAGE, ELEMENT)                                                                          \
    extern "C" __global__ void __launch_bounds__(NF4_THREADS) nf4_dequantise_##STORAGE##_octets(                  \
        const unsigned* __restrict__ packed, const float* __restrict__ maxima, ELEMENT* __restrict__ weight,      \
        unsigned elements) {                                                                                      \
        nf4_octets(packed, maxima, weight, elements);                                                             \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(NF4_THREADS) nf4_dequantise_##STORAGE(                           \
        const unsigned char* __restrict__ packed, const float* __restrict__ maxima, ELEMENT* __restrict__ weight, \
        unsigned elements) {                                                                                      \
        nf4_any(packed, maxima, weight, elements);                                                                \
    }
