// The tensor-core step as a warp has it, and the formats of its factors. A host build has its own.
//
// `Bf16`, `F16` and `Tf32` say how a factor is stored, how a binary32 becomes one (to nearest, ties to even; a
// NaN becomes the canonical one), and what a step is: 32 bytes of each factor's row, in the fragments of PTX's
// m16n8k16 and m16n8k8, whose words lie alike.
#pragma once

// Dynamic shared memory; places in it are bytes from its start, so that addresses are 32-bit sums.
extern __shared__ __align__(128) unsigned char stages[];

#ifndef BITSTEP_HOST
__device__ __forceinline__ unsigned shared_address(unsigned place) {
    return (unsigned)__cvta_generic_to_shared(stages) + place;
}
#endif

// Starts copying 16 bytes, both addresses a multiple of 16; zeros where `present` is false, and nothing is read.
__device__ __forceinline__ void copy_chunk(unsigned to, const unsigned char* from, bool present) {
#ifdef BITSTEP_HOST
    emu_cp_async(stages + to, from, 16, present ? 16 : 0);
#else
    const int bytes = present ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
#endif
}

// Four 8 x 8 matrices of 16-bit numbers, whose rows of 16 bytes the lanes' places name, eight by eight.
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], unsigned row) {
#ifdef BITSTEP_HOST
    emu_ldmatrix_x4(r, stages + row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
#endif
}

// As load_matrices, each matrix transposed.
__device__ __forceinline__ void load_transposed(unsigned (&r)[4], unsigned row) {
#ifdef BITSTEP_HOST
    emu_ldmatrix_x4_trans(r, stages + row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
#endif
}

__device__ __forceinline__ bool is_nan(unsigned bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

#define TENSOR_STEP(SHAPE, TYPE)                                                                                  \
    asm volatile("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE ".f32 "                                  \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

struct Bf16 {
    typedef unsigned short Word;
    __device__ __forceinline__ static void step(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef BITSTEP_HOST
        emu_mma_m16n8k16_bf16(d, a, b);
#else
        TENSOR_STEP("m16n8k16", "bf16");
#endif
    }
    __device__ __forceinline__ static Word narrow(float x) {
        const unsigned bits = __float_as_uint(x);
        const unsigned rounded = bits + 0x7fffu + (bits >> 16 & 1);
        return (Word)(is_nan(bits) ? 0x7fc0u : rounded >> 16);
    }
};

struct F16 {
    typedef unsigned short Word;
    __device__ __forceinline__ static void step(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef BITSTEP_HOST
        emu_mma_m16n8k16_f16(d, a, b);
#else
        TENSOR_STEP("m16n8k16", "f16");
#endif
    }
    __device__ __forceinline__ static Word narrow(float x) {
        const unsigned bits = __float_as_uint(x);
#ifdef BITSTEP_HOST
        const unsigned size = bits & 0x7fffffffu, exponent = size >> 23;
        const unsigned drop = exponent < 113 ? 126 - exponent : 13;
        const unsigned from = exponent < 113 ? (size & 0x007fffffu) | 0x00800000u : size - (112u << 23);
        unsigned rounded = 0;
        if (exponent >= 102) rounded = (from + (1u << (drop - 1)) - 1 + (from >> drop & 1)) >> drop;
        if (exponent > 142) rounded = 0x7c00;
        const unsigned half = (bits >> 16 & 0x8000u) | rounded;
#else
        unsigned short half;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
#endif
        return (Word)(is_nan(bits) ? 0x7e00u : half);
    }
};

struct Tf32 {
    typedef float Word;
    __device__ __forceinline__ static void step(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef BITSTEP_HOST
        emu_mma_m16n8k8_tf32(d, a, b);
#else
        TENSOR_STEP("m16n8k8", "tf32");
#endif
    }
    // What is stored is binary32.
    __device__ __forceinline__ static Word narrow(float x) { return x; }
    // A factor, from the binary32 that is stored.
    __device__ __forceinline__ static unsigned factor(unsigned bits) {
        const unsigned rounded = (bits + 0xfffu + (bits >> 13 & 1)) & 0xffffe000u;
        return is_nan(bits) ? 0x7fc00000u : rounded;
    }
};
