// Elements stored as bf16 or f16 (src/num/element.rs). Widening is exact; narrowing rounds once, to nearest with
// ties to even, and what is too large becomes an infinity, and a NaN the canonical one of the format.
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

/// The word with `a` in its lower half; 7fff stands for a NaN, as the device's conversion has it.
__device__ __forceinline__ unsigned round2(float a, float b, bf16) {
#ifdef BITSTEP_HOST
    return nearest(a, bf16()) | (unsigned)nearest(b, bf16()) << 16;
#else
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(b), "f"(a));
    return word;
#endif
}
__device__ __forceinline__ unsigned round2(float a, float b, f16) {
#ifdef BITSTEP_HOST
    return nearest(a, f16()) | (unsigned)nearest(b, f16()) << 16;
#else
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(b), "f"(a));
    return word;
#endif
}

/// The canonical NaN.
__device__ __forceinline__ unsigned nan_bits(bf16) { return 0x7fc0; }
__device__ __forceinline__ unsigned nan_bits(f16) { return 0x7e00; }

/// Not zero where a half of `word` is 7fff; only then.
__device__ __forceinline__ unsigned nan_halves(unsigned word) {
    const unsigned off = word ^ 0x7fff7fffu;
    return (off - 0x00010001u) & ~off & 0x80008000u;
}

/// The word with canonical NaNs.
template <typename H>
__device__ __forceinline__ unsigned canonical2(unsigned word) {
    if ((word & 0xffffu) == 0x7fffu) word = (word & 0xffff0000u) | nan_bits(H());
    if (word >> 16 == 0x7fffu) word = (word & 0xffffu) | nan_bits(H()) << 16;
    return word;
}

/// The word with `a` in its lower half, both as they are stored.
template <typename H>
__device__ __forceinline__ unsigned narrow2(float a, float b, H) {
    const unsigned word = round2(a, b, H());
    return nan_halves(word) == 0 ? word : canonical2<H>(word);
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
    const unsigned half = round2(x, x, H()) & 0xffffu;
    return H{(unsigned short)(half == 0x7fffu ? nan_bits(H()) : half)};
}

/// The greater and the smaller of each half; `max_nan` gives a NaN where one is a NaN.
__device__ __forceinline__ unsigned max_nan2(unsigned a, unsigned b, bf16) {
#ifdef BITSTEP_HOST
    const float2 x = widen2(a, bf16()), y = widen2(b, bf16());
    const float nan = __uint_as_float(0x7fc00000u);
    return round2(x.x != x.x || y.x != y.x ? nan : fmaxf(x.x, y.x), x.y != x.y || y.y != y.y ? nan : fmaxf(x.y, y.y), bf16());
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
    return round2(x.x != x.x || y.x != y.x ? nan : fmaxf(x.x, y.x), x.y != x.y || y.y != y.y ? nan : fmaxf(x.y, y.y), f16());
#else
    unsigned y;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
#endif
}
__device__ __forceinline__ unsigned min2(unsigned a, unsigned b, bf16) {
#ifdef BITSTEP_HOST
    const float2 x = widen2(a, bf16()), y = widen2(b, bf16());
    return round2(fminf(x.x, y.x), fminf(x.y, y.y), bf16());
#else
    unsigned y;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
#endif
}
__device__ __forceinline__ unsigned min2(unsigned a, unsigned b, f16) {
#ifdef BITSTEP_HOST
    const float2 x = widen2(a, f16()), y = widen2(b, f16());
    return round2(fminf(x.x, y.x), fminf(x.y, y.y), f16());
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
    uint2 words = make_uint2(round2(v.x, v.y, H()), round2(v.z, v.w, H()));
    // NaNs are rare: one question for all.
    if ((nan_halves(words.x) | nan_halves(words.y)) != 0) words = make_uint2(canonical2<H>(words.x), canonical2<H>(words.y));
    *reinterpret_cast<uint2*>(p) = words;
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
__device__ __forceinline__ uint4 round8(const Octet& x) {
    return make_uint4(round2(x.v[0], x.v[1], H()), round2(x.v[2], x.v[3], H()), round2(x.v[4], x.v[5], H()),
                      round2(x.v[6], x.v[7], H()));
}
template <typename H>
__device__ __forceinline__ uint4 narrow8(const Octet& x) {
    const uint4 w = round8<H>(x);
    if ((nan_halves(w.x) | nan_halves(w.y) | nan_halves(w.z) | nan_halves(w.w)) == 0) return w;
    return make_uint4(canonical2<H>(w.x), canonical2<H>(w.y), canonical2<H>(w.z), canonical2<H>(w.w));
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
