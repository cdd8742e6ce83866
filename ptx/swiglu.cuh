// SwiGLU over elements stored in H, which is f32, bf16 or f16: forward and backward, computed in f32 and rounded once.
//
// A block of 32 x 8 threads serves 32 columns (or as many times what 16 bytes hold) and a run of 8 * `steps` rows.
#pragma once
#include "contract.cuh"
#include "narrow_sigmoid.cuh"
#include "storage.cuh"

namespace swiglu {

using storage::Vector;

/// Up to here e^-|x| and its multiples are far from the ends of the exponents.
constexpr float NEAR = 60.0f;

/// `contract::sigmoid` for |x| <= NEAR: there no clamp acts, no power is zero, no result is subnormal, so a
/// scaling is an addition to the exponent; and there is no NaN.
__device__ __forceinline__ float sigmoid_near(float x) {
    const contract::Reduced e = contract::reduce_exp(contract::from_bits(contract::to_bits(x) | 0x80000000u));
    const unsigned n = e.n_bits << 23;
    const float s = __fadd_rn(e.r, e.tail);
    const float s_low = __fsub_rn(e.tail, __fsub_rn(s, e.r));
    const float hi = __fadd_rn(1.0f, s);
    const float lo = __fadd_rn(__fsub_rn(s, __fsub_rn(hi, 1.0f)), s_low);
    const float u = contract::from_bits(contract::to_bits(hi) + n);
    const float d = __fadd_rn(1.0f, u);
    const float low = __fmul_rn(lo, contract::from_bits(n + contract::ONE_BITS));
    const float d_low = __fadd_rn(__fsub_rn(u, __fsub_rn(d, 1.0f)), low);
    const float inverse = __frcp_rn(d);
    const bool down = x < 0.0f;
    const float top = down ? hi : 1.0f;
    const float top_low = down ? lo : 0.0f;
    float q = __fmul_rn(top, inverse);
    float rest = __fadd_rn(__fmaf_rn(contract::negate(q), d, top), top_low);
    rest = __fmaf_rn(contract::negate(q), d_low, rest);
    q = __fmaf_rn(rest, inverse, q);
    return down ? contract::from_bits(contract::to_bits(q) + n) : q;
}

/// The sigmoid of a gate stored as H.
template <typename H>
__device__ __forceinline__ float sigmoid(float x) {
    return contract::narrow_sigmoid(x);
}
template <>
__device__ __forceinline__ float sigmoid<storage::f32>(float x) {
    return contract::sigmoid(x);
}

/// The sigmoids of all elements.
template <typename H>
__device__ __forceinline__ Vector<H> sigmoids(const Vector<H>& x) {
    Vector<H> s;
#pragma unroll
    for (int i = 0; i < Vector<H>::N; ++i) s.v[i] = contract::narrow_sigmoid(x.v[i]);
    return s;
}
template <>
__device__ __forceinline__ Vector<storage::f32> sigmoids(const Vector<storage::f32>& x) {
    bool near = true;
#pragma unroll
    for (int i = 0; i < 4; ++i) near &= fabsf(x.v[i]) <= NEAR;
    Vector<storage::f32> s;
    if (near) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s.v[i] = sigmoid_near(x.v[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) s.v[i] = contract::sigmoid(x.v[i]);
    }
    return s;
}

__device__ __forceinline__ float gated(float g, float s, float u) { return __fmul_rn(__fmul_rn(g, s), u); }

/// Replaces g by dg and u by du.
__device__ __forceinline__ void backward(float da, float s, float& g, float& u) {
    const float du = __fmul_rn(da, __fmul_rn(g, s));
    g = __fmul_rn(__fmul_rn(da, u), __fmul_rn(s, __fmaf_rn(g, __fsub_rn(1.0f, s), 1.0f)));
    u = du;
}

template <typename H>
__device__ __forceinline__ void forward_rows(const H* gate_up, H* a, unsigned rows, unsigned d, unsigned steps) {
    const unsigned j = blockIdx.y * 32 + threadIdx.x;
    if (j >= d) return;
    unsigned row = blockIdx.x * 8 * steps + threadIdx.y;
    for (unsigned s = 0; s < steps && row < rows; ++s, row += 8) {
        const H* gate = gate_up + (size_t)row * 2 * d + j;
        const float g = storage::widen(gate[0]), u = storage::widen(gate[d]);
        a[(size_t)row * d + j] = storage::narrowed<H>(gated(g, sigmoid<H>(g), u));
    }
}

/// The words of the next row are under way while a row is computed.
template <typename H>
__device__ __forceinline__ void forward_vectors(const H* gate_up, H* a, unsigned rows, unsigned d, unsigned steps) {
    constexpr int N = Vector<H>::N;
    const unsigned j = (blockIdx.y * 32 + threadIdx.x) * N;
    if (j >= d) return;
    unsigned row = blockIdx.x * 8 * steps + threadIdx.y;
    if (row >= rows) return;
    const H* gate = gate_up + (size_t)row * 2 * d + j;
    uint4 g_words = storage::load_words(gate), u_words = storage::load_words(gate + d);
    for (unsigned s = 0; s < steps && row < rows; ++s, row += 8) {
        const Vector<H> g(g_words), u(u_words);
        if (s + 1 < steps && row + 8 < rows) {
            gate += (size_t)16 * d;
            g_words = storage::load_words(gate), u_words = storage::load_words(gate + d);
        }
        const Vector<H> y = sigmoids(g);
        Vector<H> out;
#pragma unroll
        for (int i = 0; i < N; ++i) out.v[i] = gated(g.v[i], y.v[i], u.v[i]);
        storage::store_vector(a + (size_t)row * d + j, out);
    }
}

/// `RESTORE`: the output, as forward writes it, over its gradient.
template <typename H, bool RESTORE>
__device__ __forceinline__ void backward_rows(H* da, H* gate_up, unsigned rows, unsigned d, unsigned steps) {
    const unsigned j = blockIdx.y * 32 + threadIdx.x;
    if (j >= d) return;
    unsigned row = blockIdx.x * 8 * steps + threadIdx.y;
    for (unsigned step = 0; step < steps && row < rows; ++step, row += 8) {
        H* gate = gate_up + (size_t)row * 2 * d + j;
        H* gradient = da + (size_t)row * d + j;
        float g = storage::widen(gate[0]), u = storage::widen(gate[d]);
        const float y = storage::widen(*gradient), s = sigmoid<H>(g);
        if (RESTORE) *gradient = storage::narrowed<H>(gated(g, s, u));
        backward(y, s, g, u);
        gate[0] = storage::narrowed<H>(g);
        gate[d] = storage::narrowed<H>(u);
    }
}

template <typename H, bool RESTORE>
__device__ __forceinline__ void backward_vectors(H* da, H* gate_up, unsigned rows, unsigned d, unsigned steps) {
    constexpr int N = Vector<H>::N;
    const unsigned j = (blockIdx.y * 32 + threadIdx.x) * N;
    if (j >= d) return;
    unsigned row = blockIdx.x * 8 * steps + threadIdx.y;
    for (unsigned s = 0; s < steps && row < rows; ++s, row += 8) {
        H* gate = gate_up + (size_t)row * 2 * d + j;
        Vector<H> g = storage::load_vector(gate), u = storage::load_vector(gate + d);
        H* gradient = da + (size_t)row * d + j;
        const Vector<H> y = storage::load_vector(gradient), sigmoid = sigmoids(g);
        Vector<H> out;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (RESTORE) out.v[i] = gated(g.v[i], sigmoid.v[i], u.v[i]);
            backward(y.v[i], sigmoid.v[i], g.v[i], u.v[i]);
        }
        if (RESTORE) storage::store_vector(gradient, out);
        storage::store_vector(gate, g);
        storage::store_vector(gate + d, u);
    }
}

}  // namespace swiglu

#define SWIGLU_ENTRY(NAME, H, BODY)                                                                           \
    extern "C" __global__ void __launch_bounds__(256)                                                         \
    NAME(const storage::H* __restrict__ gate_up, storage::H* __restrict__ a, unsigned rows, unsigned d,         \
         unsigned steps) {                                                                                    \
        swiglu::BODY(gate_up, a, rows, d, steps);                                                             \
    }

#define SWIGLU_GRAD_ENTRY(NAME, H, BODY, RESTORE)                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                         \
    NAME(storage::H* __restrict__ da, storage::H* __restrict__ gate_up, unsigned rows, unsigned d,              \
         unsigned steps) {                                                                                    \
        swiglu::BODY<storage::H, RESTORE>(da, gate_up, rows, d, steps);                                       \
    }
