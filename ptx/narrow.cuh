// Elements stored as bf16 or f16 (src/num/element.rs). Widening is exact; narrowing rounds once, to nearest with
// ties to even, and what is too large becomes an infinity. A NaN stays one; its bits are no part of the contract.
#pragma once

namespace narrow {

struct bf16 {
    unsigned short bits;
};
struct f16 {
    unsigned short bits;
};

#ifdef BITSTEP_HOST
__device__ __forceinline__ unsigned short nearest(float x, bf16) {
    const unsigned bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
__device__ __forceinline__ unsigned short nearest(float x, f16) {
    const unsigned bits = __float_as_uint(x), size = bits & 0x7fffffffu, exponent = size >> 23;
    const unsigned sign = bits >> 16 & 0x8000u, mantissa = (size & 0x7fffffu) | 0x800000u;
    if (x != x) return 0x7fff;
    if (exponent < 102) return sign;
    if (exponent > 142) return sign | 0x7c00;
    const unsigned from = exponent < 113 ? mantissa : size - (112u << 23), dropped = exponent < 113 ? 126 - exponent : 13;
    return sign | ((from + (1u << (dropped - 1)) - 1 + (from >> dropped & 1)) >> dropped);
}
__device__ __forceinline__ float widened(unsigned short bits, f16) {
    const unsigned exponent = bits >> 10 & 31, mantissa = bits & 0x3ff, sign = (bits & 0x8000u) << 16;
    if (exponent == 0) return __uint_as_float(__float_as_uint(__fmul_rn((float)mantissa, 5.9604644775390625e-8f)) | sign);
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
    return __uint_as_float(sign | (((bits & 0x7fffu) << 13) + (112u << 23)));
}
#endif

/// The two elements of a word, the one in its lower half first.
__device__ __forceinline__ float2 widen2(unsigned word, bf16) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}
__device__ __forceinline__ float2 widen2(unsigned word, f16) {
#ifdef BITSTEP_HOST
    return make_float2(widened((unsigned short)word, f16()), widened((unsigned short)(word >> 16), f16()));
#else
    float2 y;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(y.x), "=f"(y.y) : "r"(word));
    return y;
#endif
}

/// The word with `a` in its lower half.
__device__ __forceinline__ unsigned narrow2(float a, float b, bf16) {
#ifdef BITSTEP_HOST
    return nearest(a, bf16()) | (unsigned)nearest(b, bf16()) << 16;
#else
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(b), "f"(a));
    return word;
#endif
}
__device__ __forceinline__ unsigned narrow2(float a, float b, f16) {
#ifdef BITSTEP_HOST
    return nearest(a, f16()) | (unsigned)nearest(b, f16()) << 16;
#else
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(b), "f"(a));
    return word;
#endif
}

/// One element.
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ __forceinline__ float widen(f16 x) {
#ifdef BITSTEP_HOST
    return widened(x.bits, f16());
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#endif
}
template <typename H>
__device__ __forceinline__ H narrowed(float x) {
    return H{(unsigned short)narrow2(x, x, H())};
}

/// The greater and the smaller of each half; `max_nan` gives a NaN where one is a NaN.
__device__ __forceinline__ unsigned max_nan2(unsigned a, unsigned b, bf16) {
#ifdef BITSTEP_HOST
    const float2 x = widen2(a, bf16()), y = widen2(b, bf16());
    const float nan = __uint_as_float(0x7fc00000u);
    return narrow2(x.x != x.x || y.x != y.x ? nan : fmaxf(x.x, y.x), x.y != x.y || y.y != y.y ? nan : fmaxf(x.y, y.y), bf16());
#else
    unsigned y;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
#endif
}
__device__ __forceinline__ unsigned max_nan2(unsigned a, unsigned b, f16) {
#ifdef BITSTEP_HOST
    const float2 x = widen2(a, f16()), y = widen2(b, f16());
    const float nan = __uint_as_float(0x7fc00000u);
    return narrow2(x.x != x.x || y.x != y.x ? nan : fmaxf(x.x, y.x), x.y != x.y || y.y != y.y ? nan : fmaxf(x.y, y.y), f16());
#else
    unsigned y;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
#endif
}
__device__ __forceinline__ unsigned min2(unsigned a, unsigned b, bf16) {
#ifdef BITSTEP_HOST
    const float2 x = widen2(a, bf16()), y = widen2(b, bf16());
    return narrow2(fminf(x.x, y.x), fminf(x.y, y.y), bf16());
#else
    unsigned y;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
#endif
}
__device__ __forceinline__ unsigned min2(unsigned a, unsigned b, f16) {
#ifdef BITSTEP_HOST
    const float2 x = widen2(a, f16()), y = widen2(b, f16());
    return narrow2(fminf(x.x, y.x), fminf(x.y, y.y), f16());
#else
    unsigned y;
    asm("min.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
#endif
}

/// Four elements at a multiple of 8 bytes.
template <typename H>
__device__ __forceinline__ float4 load4(const H* p) {
    const uint2 words = *reinterpret_cast<const uint2*>(p);
    const float2 a = widen2(words.x, H()), b = widen2(words.y, H());
    return make_float4(a.x, a.y, b.x, b.y);
}
template <typename H>
__device__ __forceinline__ void store4(H* p, float4 v) {
    *reinterpret_cast<uint2*>(p) = make_uint2(narrow2(v.x, v.y, H()), narrow2(v.z, v.w, H()));
}

/// Eight elements at a multiple of 16 bytes.
struct Octet {
    float v[8];
};
template <typename H>
__device__ __forceinline__ Octet widen8(uint4 words) {
    const float2 a = widen2(words.x, H()), b = widen2(words.y, H()), c = widen2(words.z, H()), d = widen2(words.w, H());
    return {{a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y}};
}
template <typename H>
__device__ __forceinline__ uint4 narrow8(const Octet& x) {
    return make_uint4(narrow2(x.v[0], x.v[1], H()), narrow2(x.v[2], x.v[3], H()), narrow2(x.v[4], x.v[5], H()),
                      narrow2(x.v[6], x.v[7], H()));
}
template <typename H>
__device__ __forceinline__ Octet load8(const H* p) {
    return widen8<H>(*reinterpret_cast<const uint4*>(p));
}
template <typename H>
__device__ __forceinline__ void store8(H* p, const Octet& x) {
    *reinterpret_cast<uint4*>(p) = narrow8<H>(x);
}

}  // namespace narrow
