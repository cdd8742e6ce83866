// Elements stored as f32, bf16 or f16, so that one kernel serves all of them: what narrow.cuh has for the two
// narrow ones, and the same names for f32, where nothing is rounded.
#pragma once
#include "contract.cuh"
#include "narrow.cuh"

namespace storage {

typedef float f32;
using narrow::bf16;
using narrow::f16;

using contract::load4;
using contract::store4;
using narrow::load4;
using narrow::store4;

using narrow::widen;
__device__ __forceinline__ float widen(f32 x) { return x; }

/// `x` rounded once to H.
template <typename H>
__device__ __forceinline__ H narrowed(float x) {
    return narrow::narrowed<H>(x);
}
template <>
__device__ __forceinline__ f32 narrowed<f32>(float x) {
    return x;
}

/// What 16 bytes hold, widened.
template <typename H>
struct Vector {
    static constexpr int N = 16 / sizeof(H);
    float v[N];

    __device__ __forceinline__ Vector() {}
    __device__ __forceinline__ explicit Vector(uint4 words) {
        if constexpr (N == 4) {
            v[0] = __uint_as_float(words.x), v[1] = __uint_as_float(words.y);
            v[2] = __uint_as_float(words.z), v[3] = __uint_as_float(words.w);
        } else {
            const narrow::Octet x = narrow::widen8<H>(words);
#pragma unroll
            for (int i = 0; i < N; ++i) v[i] = x.v[i];
        }
    }
    /// Rounded once to H.
    __device__ __forceinline__ uint4 words() const {
        if constexpr (N == 4) {
            return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
        } else {
            narrow::Octet x;
#pragma unroll
            for (int i = 0; i < N; ++i) x.v[i] = v[i];
            return narrow::narrow8<H>(x);
        }
    }
};

/// 16 bytes at a multiple of 16.
template <typename H>
__device__ __forceinline__ uint4 load_words(const H* p) {
    return *reinterpret_cast<const uint4*>(p);
}
template <typename H>
__device__ __forceinline__ Vector<H> load_vector(const H* p) {
    return Vector<H>(load_words(p));
}
template <typename H>
__device__ __forceinline__ void store_vector(H* p, const Vector<H>& x) {
    *reinterpret_cast<uint4*>(p) = x.words();
}

}  // namespace storage
