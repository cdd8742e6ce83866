// r = x + delta (with a residual), rstd = 1 / sqrt(sum r^2 / d + eps), h = (r * rstd) * weight: a warp a row. The
// residual stream x and r is stored in f32, delta and h in H: f32, bf16 or f16.
#pragma once
#include "contract.cuh"
#include "storage.cuh"

namespace rms_norm {

using storage::load4;
using storage::store4;

template <typename H>
struct Params {
    const float* x;
    const H* delta;
    const float* weight;
    float* r;
    H* h;
    float* rstd;
    unsigned rows;
    unsigned d;
    float eps;
};

__device__ __forceinline__ float row_rstd(float squares, unsigned d, float eps) {
    return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(squares, __uint2float_rn(d)), eps)));
}

__device__ __forceinline__ float scaled(float r, float rstd, float w) { return __fmul_rn(__fmul_rn(r, rstd), w); }

__device__ __forceinline__ float4 scaled4(float4 r, float rstd, float4 w) {
    return make_float4(scaled(r.x, rstd, w.x), scaled(r.y, rstd, w.y), scaled(r.z, rstd, w.z), scaled(r.w, rstd, w.w));
}

template <bool RESIDUAL, typename H>
__device__ __forceinline__ float4 input4(const Params<H>& p, size_t i) {
    const float4 x = load4(p.x + i);
    if (!RESIDUAL) return x;
    const float4 y = load4(p.delta + i);
    return make_float4(__fadd_rn(x.x, y.x), __fadd_rn(x.y, y.y), __fadd_rn(x.z, y.z), __fadd_rn(x.w, y.w));
}

__device__ __forceinline__ void square4(float4 v, float* lanes) {
    lanes[0] = __fmaf_rn(v.x, v.x, lanes[0]);
    lanes[1] = __fmaf_rn(v.y, v.y, lanes[1]);
    lanes[2] = __fmaf_rn(v.z, v.z, lanes[2]);
    lanes[3] = __fmaf_rn(v.w, v.w, lanes[3]);
}

/// Rows of at most 128 * HELD elements, held in registers; aligned quads. Short rows read the weight before
/// the reduction, so that its latency hides behind the row's own.
template <bool RESIDUAL, int HELD, typename H>
__device__ __forceinline__ void norm_held(const Params<H>& p) {
    constexpr bool EARLY = HELD <= 2;
    const unsigned row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x & 31u;
    if (row >= p.rows) return;
    const size_t start = (size_t)row * p.d;
    float4 v[HELD], w[EARLY ? HELD : 1];
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        const unsigned i = 4 * lane + 128 * k;
        if (EARLY && i < p.d) w[k] = load4(p.weight + i);
        if (i < p.d) v[k] = input4<RESIDUAL>(p, start + i);
    }
    float lanes[8] = {};
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        const unsigned i = 4 * lane + 128 * k;
        if (i >= p.d) continue;
        if (RESIDUAL) store4(p.r + start + i, v[k]);
        square4(v[k], lanes + 4 * (k % 2));
    }
    const float rstd = row_rstd(contract::fold_quads(lanes), p.d, p.eps);
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        const unsigned i = 4 * lane + 128 * k;
        if (i < p.d) store4(p.h + start + i, scaled4(v[k], rstd, EARLY ? w[EARLY ? k : 0] : load4(p.weight + i)));
    }
    if (lane == 0) p.rstd[row] = rstd;
}

/// Rows of any length; the second pass reads what the thread itself read or wrote in the first.
template <bool RESIDUAL, bool QUADS, typename H>
__device__ __forceinline__ void norm_any(const Params<H>& p) {
    const unsigned row = blockIdx.x * 4 + threadIdx.x / 32;
    if (row >= p.rows) return;
    const size_t start = (size_t)row * p.d;
    const float* r = (RESIDUAL ? p.r : p.x) + start;
    float lanes[8] = {};
    float squares;
    if (QUADS) {
        contract::for_quads(p.d, [&](unsigned i, int lane) {
            const float4 v = input4<RESIDUAL>(p, start + i);
            if (RESIDUAL) store4(p.r + start + i, v);
            square4(v, lanes + lane);
        });
        squares = contract::fold_quads(lanes);
    } else {
        contract::for_strided(p.d, [&](unsigned i, int lane) {
            float v = p.x[start + i];
            if (RESIDUAL) {
                v = __fadd_rn(v, storage::widen(p.delta[start + i]));
                p.r[start + i] = v;
            }
            lanes[lane] = __fmaf_rn(v, v, lanes[lane]);
        });
        squares = contract::fold_strided(lanes);
    }
    const float rstd = row_rstd(squares, p.d, p.eps);
    if (QUADS)
        contract::for_quads(p.d, [&](unsigned i, int) { store4(p.h + start + i, scaled4(load4(r + i), rstd, load4(p.weight + i))); });
    else
        contract::for_strided(p.d, [&](unsigned i, int) { p.h[start + i] = storage::narrowed<H>(scaled(r[i], rstd, p.weight[i])); });
    if ((threadIdx.x & 31u) == 0) p.rstd[row] = rstd;
}

}  // namespace rms_norm

#define RMS_NORM_PLAIN(NAME, H, BOUNDS, BODY, ...)                                                            \
    extern "C" __global__ void __launch_bounds__ BOUNDS                                                       \
    NAME(const float* __restrict__ x, const float* __restrict__ weight, storage::H* __restrict__ h,           \
         float* __restrict__ rstd, unsigned rows, unsigned d, float eps) {                                    \
        rms_norm::BODY<false, __VA_ARGS__>(rms_norm::Params<storage::H>{x, nullptr, weight, nullptr, h, rstd, rows, d, eps});\
    }

#define RMS_NORM_RESIDUAL(NAME, H, BOUNDS, BODY, ...)                                                         \
    extern "C" __global__ void __launch_bounds__ BOUNDS                                                       \
    NAME(const float* __restrict__ x, const storage::H* __restrict__ delta, const float* __restrict__ weight, \
         float* __restrict__ r, storage::H* __restrict__ h, float* __restrict__ rstd, unsigned rows,          \
         unsigned d, float eps) {                                                                             \
        rms_norm::BODY<true, __VA_ARGS__>(rms_norm::Params<storage::H>{x, delta, weight, r, h, rstd, rows, d, eps});\
    }

#define RMS_NORM_ENTRIES(H)                                                                                   \
    RMS_NORM_PLAIN(rms_norm_##H, H, (128, 8), norm_any, false)                                                \
    RMS_NORM_PLAIN(rms_norm_##H##_quads, H, (128), norm_any, true)                                            \
    RMS_NORM_PLAIN(rms_norm_##H##_quads_256, H, (128, 8), norm_held, 2)                                       \
    RMS_NORM_PLAIN(rms_norm_##H##_quads_1024, H, (128), norm_held, 8)                                         \
    RMS_NORM_PLAIN(rms_norm_##H##_quads_2048, H, (128), norm_held, 16)                                        \
    RMS_NORM_RESIDUAL(rms_norm_##H##_residual, H, (128, 8), norm_any, false)                                  \
    RMS_NORM_RESIDUAL(rms_norm_##H##_residual_quads, H, (128), norm_any, true)                                \
    RMS_NORM_RESIDUAL(rms_norm_##H##_residual_quads_256, H, (128, 8), norm_held, 2)                           \
    RMS_NORM_RESIDUAL(rms_norm_##H##_residual_quads_1024, H, (128), norm_held, 8)                             \
    RMS_NORM_RESIDUAL(rms_norm_##H##_residual_quads_2048, H, (128), norm_held, 16)
