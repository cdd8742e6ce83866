// One or two neighbouring elements of a row, stored as f32, bf16 or f16; computed with as f32. Two lie at a multiple of
// their size.
#pragma once
#include "quads.cuh"

namespace few {

/// `W` elements as they are stored.
template <unsigned W, typename T>
struct Stored;
template <typename T>
struct Stored<1, T> {
    T element;
    __device__ __forceinline__ void widen(float (&v)[1]) const { v[0] = quads::number(element); }
    static __device__ __forceinline__ Stored minus_zero() { return {T{(unsigned short)0x8000}}; }
};
template <>
struct Stored<1, float> {
    float element;
    __device__ __forceinline__ void widen(float (&v)[1]) const { v[0] = element; }
    static __device__ __forceinline__ Stored minus_zero() { return {-0.0f}; }
};
template <typename T>
struct Stored<2, T> {
    unsigned word;
    __device__ __forceinline__ void widen(float (&v)[2]) const {
        const float2 two = narrow::widen2(word, T());
        v[0] = two.x;
        v[1] = two.y;
    }
    static __device__ __forceinline__ Stored minus_zero() { return {0x80008000u}; }
};
template <>
struct Stored<2, float> {
    float2 words;
    __device__ __forceinline__ void widen(float (&v)[2]) const {
        v[0] = words.x;
        v[1] = words.y;
    }
    static __device__ __forceinline__ Stored minus_zero() { return {make_float2(-0.0f, -0.0f)}; }
};

template <unsigned W, typename T>
__device__ __forceinline__ Stored<W, T> fetch(const T* p) {
    return *reinterpret_cast<const Stored<W, T>*>(p);
}

/// Four elements as they are stored, rounded once.
template <typename T>
struct Rounded {
    unsigned words[2];

    __device__ __forceinline__ explicit Rounded(const float (&v)[4])
        : words{narrow::round2(v[0], v[1], T()), narrow::round2(v[2], v[3], T())} {
        quads::mend_nans<T>(words, __fadd_rn(__fadd_rn(v[0], v[1]), __fadd_rn(v[2], v[3])));
    }
    /// Writes the elements from `W * i` on.
    template <unsigned W>
    __device__ __forceinline__ void put(T* p, unsigned i) const {
        if (W == 2) *reinterpret_cast<unsigned*>(p) = words[i];
        else *reinterpret_cast<unsigned short*>(p) = (unsigned short)(i % 2 == 0 ? words[i / 2] : words[i / 2] >> 16);
    }
};
template <>
struct Rounded<float> {
    float v[4];

    __device__ __forceinline__ explicit Rounded(const float (&x)[4]) : v{x[0], x[1], x[2], x[3]} {}
    template <unsigned W>
    __device__ __forceinline__ void put(float* p, unsigned i) const {
        if (W == 2) *reinterpret_cast<float2*>(p) = make_float2(v[2 * i], v[2 * i + 1]);
        else *p = v[i];
    }
};

}  // namespace few
