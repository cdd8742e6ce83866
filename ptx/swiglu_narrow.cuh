// SwiGLU over elements stored in H: forward and backward, computed in f32 and rounded once.
//
// A block of 32 x 8 threads serves 32 columns (or octets of columns) and a run of 8 * `steps` rows.
#pragma once
#include "contract.cuh"
#include "narrow.cuh"

namespace swiglu {

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

/// Whether all of eight elements are near.
__device__ __forceinline__ bool all_near(const narrow::Octet& x) {
    bool near = true;
#pragma unroll
    for (int i = 0; i < 8; ++i) near &= fabsf(x.v[i]) <= NEAR;
    return near;
}

/// The sigmoids of eight elements.
__device__ __forceinline__ narrow::Octet sigmoids(const narrow::Octet& x) {
    narrow::Octet s;
    if (all_near(x)) {
#pragma unroll
        for (int i = 0; i < 8; ++i) s.v[i] = sigmoid_near(x.v[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) s.v[i] = contract::sigmoid(x.v[i]);
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
        const float g = narrow::widen(gate[0]), u = narrow::widen(gate[d]);
        a[(size_t)row * d + j] = narrow::narrowed<H>(gated(g, contract::sigmoid(g), u));
    }
}

template <typename H>
__device__ __forceinline__ void forward_octets(const H* gate_up, H* a, unsigned rows, unsigned d, unsigned steps) {
    const unsigned j = (blockIdx.y * 32 + threadIdx.x) * 8;
    if (j >= d) return;
    unsigned row = blockIdx.x * 8 * steps + threadIdx.y;
    for (unsigned s = 0; s < steps && row < rows; ++s, row += 8) {
        const H* gate = gate_up + (size_t)row * 2 * d + j;
        const narrow::Octet g = narrow::load8(gate), u = narrow::load8(gate + d), y = sigmoids(g);
        narrow::Octet out;
#pragma unroll
        for (int i = 0; i < 8; ++i) out.v[i] = gated(g.v[i], y.v[i], u.v[i]);
        narrow::store8(a + (size_t)row * d + j, out);
    }
}

template <typename H>
__device__ __forceinline__ void backward_rows(const H* da, H* gate_up, unsigned rows, unsigned d, unsigned steps) {
    const unsigned j = blockIdx.y * 32 + threadIdx.x;
    if (j >= d) return;
    unsigned row = blockIdx.x * 8 * steps + threadIdx.y;
    for (unsigned s = 0; s < steps && row < rows; ++s, row += 8) {
        H* gate = gate_up + (size_t)row * 2 * d + j;
        float g = narrow::widen(gate[0]), u = narrow::widen(gate[d]);
        backward(narrow::widen(da[(size_t)row * d + j]), contract::sigmoid(g), g, u);
        gate[0] = narrow::narrowed<H>(g);
        gate[d] = narrow::narrowed<H>(u);
    }
}

template <typename H>
__device__ __forceinline__ void backward_octets(const H* da, H* gate_up, unsigned rows, unsigned d, unsigned steps) {
    const unsigned j = (blockIdx.y * 32 + threadIdx.x) * 8;
    if (j >= d) return;
    unsigned row = blockIdx.x * 8 * steps + threadIdx.y;
    for (unsigned s = 0; s < steps && row < rows; ++s, row += 8) {
        H* gate = gate_up + (size_t)row * 2 * d + j;
        narrow::Octet g = narrow::load8(gate), u = narrow::load8(gate + d);
        const narrow::Octet y = narrow::load8(da + (size_t)row * d + j), sigmoid = sigmoids(g);
#pragma unroll
        for (int i = 0; i < 8; ++i) backward(y.v[i], sigmoid.v[i], g.v[i], u.v[i]);
        narrow::store8(gate, g);
        narrow::store8(gate + d, u);
    }
}

}  // namespace swiglu

#define SWIGLU_ENTRY(NAME, H, BODY)                                                                           \
    extern "C" __global__ void __launch_bounds__(256)                                                         \
    NAME(const narrow::H* __restrict__ gate_up, narrow::H* __restrict__ a, unsigned rows, unsigned d,         \
         unsigned steps) {                                                                                    \
        swiglu::BODY(gate_up, a, rows, d, steps);                                                             \
    }

#define SWIGLU_GRAD_ENTRY(NAME, H, BODY)                                                                      \
    extern "C" __global__ void __launch_bounds__(256)                                                         \
    NAME(const narrow::H* __restrict__ da, narrow::H* __restrict__ gate_up, unsigned rows, unsigned d,        \
         unsigned steps) {                                                                                    \
        swiglu::BODY(da, gate_up, rows, d, steps);                                                            \
    }
