// Four neighbouring elements of a row, stored as f32, bf16 or f16; computed with as f32.
#pragma once
#include "narrow.cuh"

namespace quads {

struct Quad {
    float v[4];
};

/// Four elements as they are stored.
template <typename T>
struct Stored {
    uint2 words;
};
template <>
struct Stored<float> {
    float4 words;
};

__device__ __forceinline__ float number(float x) { return x; }
template <typename H>
__device__ __forceinline__ float number(H x) { return narrow::widen(x); }

template <typename T>
struct Round {
    static __device__ __forceinline__ T to(float x) { return narrow::narrowed<T>(x); }
};
template <>
struct Round<float> {
    static __device__ __forceinline__ float to(float x) { return x; }
};

/// `count` of four elements, the others zero. `whole`: four of them, at a multiple of their size.
template <typename T>
__device__ __forceinline__ Stored<T> fetch(const T* p, unsigned count, bool whole) {
    if (whole) return Stored<T>{*reinterpret_cast<const uint2*>(p)};
    unsigned short bits[4];
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) bits[i] = i < count ? p[i].bits : (unsigned short)0;
    return Stored<T>{make_uint2(bits[0] | (unsigned)bits[1] << 16, bits[2] | (unsigned)bits[3] << 16)};
}
template <>
__device__ __forceinline__ Stored<float> fetch(const float* p, unsigned count, bool whole) {
    if (whole) return Stored<float>{*reinterpret_cast<const float4*>(p)};
    return Stored<float>{make_float4(count > 0 ? p[0] : 0.0f, count > 1 ? p[1] : 0.0f, count > 2 ? p[2] : 0.0f,
                                     count > 3 ? p[3] : 0.0f)};
}

template <typename T>
__device__ __forceinline__ Quad widen(const Stored<T>& x) {
    const float2 a = narrow::widen2(x.words.x, T()), b = narrow::widen2(x.words.y, T());
    return {{a.x, a.y, b.x, b.y}};
}
template <>
__device__ __forceinline__ Quad widen(const Stored<float>& x) {
    return {{x.words.x, x.words.y, x.words.z, x.words.w}};
}

/// Two words of elements with canonical NaNs, `sum` being a NaN where one of the elements is. NaNs are rare, so that all are asked for
/// at once; a loop is nothing that a predicate can stand for.
template <typename T>
__device__ __forceinline__ void mend_nans(unsigned (&words)[2], float sum) {
    if (sum == sum) return;
#pragma unroll
    for (unsigned i = 0; i < 2; ++i)
        while (narrow::nan_halves(words[i]) != 0) words[i] = narrow::canonical2<T>(words[i]);
}

/// Writes `count` of four elements.
template <typename T>
__device__ __forceinline__ void put(T* p, const Quad& x, unsigned count, bool whole) {
    if (whole) {
        unsigned words[2] = {narrow::round2(x.v[0], x.v[1], T()), narrow::round2(x.v[2], x.v[3], T())};
        mend_nans<T>(words, __fadd_rn(__fadd_rn(x.v[0], x.v[1]), __fadd_rn(x.v[2], x.v[3])));
        *reinterpret_cast<uint2*>(p) = make_uint2(words[0], words[1]);
        return;
    }
#pragma unroll
    for (unsigned i = 0; i < 4; ++i)
        if (i < count) p[i] = narrow::narrowed<T>(x.v[i]);
}
template <>
__device__ __forceinline__ void put(float* p, const Quad& x, unsigned count, bool whole) {
    if (whole) {
        *reinterpret_cast<float4*>(p) = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
        return;
    }
#pragma unroll
    for (unsigned i = 0; i < 4; ++i)
        if (i < count) p[i] = x.v[i];
}

}  // namespace quads
