// One step of AdamW over the whole parameter arena, or nothing (src/op/adamw.rs). Where H is bf16 or f16 the
// run of parameters has a shadow in it; where H is f32 there is none.
#pragma once
#include "storage.cuh"

namespace adamw {

constexpr int THREADS = 256;
constexpr int VECTORS = 2;
constexpr int BLOCK = THREADS * VECTORS * 4;

// Words of the scalars slot and of the report slot (src/op/step_values.rs).
constexpr int SCALAR_LR = 0;
constexpr int SCALAR_C1 = 1;
constexpr int SCALAR_C2 = 2;
constexpr int SCALAR_DECAY = 3;
constexpr int REPORT_COEFFICIENT = 2;
constexpr int REPORT_APPLIED = 3;
constexpr int REPORT_LOSS_SCALE = 5;

struct Constants {
    float beta1, rest1, beta2, rest2, eps;
};

// The run of elements that has a shadow.
struct Run {
    unsigned long long first, elements;
    // Whether quads of four elements lie in it whole or not at all.
    __device__ __forceinline__ bool by_quads() const { return ((first | elements) & 3) == 0; }
    __device__ __forceinline__ bool holds(unsigned long long i) const { return i - first < elements; }
};

struct Step {
    float lr, c1, c2, coefficient;
    // One over the loss scale that the gradients carry, a power of two.
    float unscale;
};

template <bool SCALED>
__device__ __forceinline__ void update(const Constants& k, const Step& s, float decay, float grad, float& p,
                                       float& m, float& v)
{
    const float g = __fmul_rn(SCALED ? __fmul_rn(grad, s.unscale) : grad, s.coefficient);
    m = __fmaf_rn(k.beta1, m, __fmul_rn(k.rest1, g));
    v = __fmaf_rn(k.beta2, v, __fmul_rn(__fmul_rn(k.rest2, g), g));
    const float root = __fsqrt_rn(__fmul_rn(v, s.c2));
    const float u = __fdiv_rn(__fmul_rn(m, s.c1), __fadd_rn(root, k.eps));
    p = __fmaf_rn(-s.lr, u, __fmul_rn(p, decay));
}

// Element counts are two words each, the low one first. The grid has one block for every BLOCK elements.
template <bool SCALED, typename H>
__device__ __forceinline__ void step(const float* grad, const float* scalars, const unsigned* report, float* param,
                                     float* moment1, float* moment2, H* shadow, const Run& run, unsigned n_low,
                                     unsigned n_high, unsigned decayed_low, unsigned decayed_high, const Constants& k)
{
    constexpr bool SHADOWED = sizeof(H) == 2;
    const unsigned long long n = (unsigned long long)n_high << 32 | n_low;
    const unsigned long long decayed = (unsigned long long)decayed_high << 32 | decayed_low;
    const unsigned long long start = (unsigned long long)blockIdx.x * BLOCK;
    const unsigned applied = report[REPORT_APPLIED];
    const float decay = scalars[SCALAR_DECAY];
    const Step s = {scalars[SCALAR_LR], scalars[SCALAR_C1], scalars[SCALAR_C2],
                    __uint_as_float(report[REPORT_COEFFICIENT]),
                    SCALED ? __frcp_rn(__uint_as_float(report[REPORT_LOSS_SCALE])) : 1.0f};
    const bool aligned = (((unsigned long long)grad | (unsigned long long)param | (unsigned long long)moment1 |
                           (unsigned long long)moment2 | (unsigned long long)shadow) & 15) == 0;
    if (aligned && (!SHADOWED || run.by_quads()) && start + BLOCK <= n) {
        float4 g[VECTORS], p[VECTORS], m[VECTORS], v[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const unsigned at = i * THREADS + threadIdx.x;
            g[i] = ((const float4*)(grad + start))[at];
            m[i] = ((const float4*)(moment1 + start))[at];
            v[i] = ((const float4*)(moment2 + start))[at];
            p[i] = ((const float4*)(param + start))[at];
        }
        // The loads above do not wait for the decision; the stores do.
        if (applied == 0) {
            return;
        }
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const unsigned at = i * THREADS + threadIdx.x;
            const unsigned long long first = start + 4ull * at;
            update<SCALED>(k, s, first + 0 < decayed ? decay : 1.0f, g[i].x, p[i].x, m[i].x, v[i].x);
            update<SCALED>(k, s, first + 1 < decayed ? decay : 1.0f, g[i].y, p[i].y, m[i].y, v[i].y);
            update<SCALED>(k, s, first + 2 < decayed ? decay : 1.0f, g[i].z, p[i].z, m[i].z, v[i].z);
            update<SCALED>(k, s, first + 3 < decayed ? decay : 1.0f, g[i].w, p[i].w, m[i].w, v[i].w);
            ((float4*)(moment1 + start))[at] = m[i];
            ((float4*)(moment2 + start))[at] = v[i];
            ((float4*)(param + start))[at] = p[i];
            if (SHADOWED && run.holds(first)) {
                storage::store4(shadow + (first - run.first), p[i]);
            }
        }
        return;
    }
    if (applied == 0) {
        return;
    }
    const unsigned long long end = start + BLOCK < n ? start + BLOCK : n;
    for (unsigned long long i = start + threadIdx.x; i < end; i += THREADS) {
        float p = param[i], m = moment1[i], v = moment2[i];
        update<SCALED>(k, s, i < decayed ? decay : 1.0f, grad[i], p, m, v);
        moment1[i] = m;
        moment2[i] = v;
        param[i] = p;
        if (SHADOWED && run.holds(i)) {
            shadow[i - run.first] = storage::narrowed<H>(p);
        }
    }
}

}  // namespace adamw

#define ADAMW_OPERANDS                                                                                        \
    const float *__restrict__ grad, const float *__restrict__ scalars, const unsigned *__restrict__ report,   \
        float *__restrict__ param, float *__restrict__ moment1, float *__restrict__ moment2

#define ADAMW_SIZES unsigned n_low, unsigned n_high, unsigned decayed_low, unsigned decayed_high

#define ADAMW_CONSTANTS float beta1, float rest1, float beta2, float rest2, float eps

#define ADAMW_STEP(SCALED, SHADOW, RUN)                                                                       \
    adamw::step<SCALED>(grad, scalars, report, param, moment1, moment2, SHADOW, RUN, n_low, n_high,           \
                        decayed_low, decayed_high, adamw::Constants{beta1, rest1, beta2, rest2, eps})

#define ADAMW_ENTRY(NAME)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 4) NAME(ADAMW_OPERANDS, ADAMW_SIZES, ADAMW_CONSTANTS)   \
    {                                                                                                         \
        ADAMW_STEP(false, (storage::f32*)nullptr, (adamw::Run{0, 0}));                                        \
    }

#define ADAMW_SHADOW_ENTRY(NAME, H, SCALED)                                                                   \
    extern "C" __global__ void __launch_bounds__(256, 4)                                                      \
        NAME(ADAMW_OPERANDS, storage::H* __restrict__ shadow, ADAMW_SIZES, unsigned first_low,                \
             unsigned first_high, unsigned run_low, unsigned run_high, ADAMW_CONSTANTS)                       \
    {                                                                                                         \
        const adamw::Run run = {(unsigned long long)first_high << 32 | first_low,                             \
                                (unsigned long long)run_high << 32 | run_low};                                \
        ADAMW_STEP(SCALED, shadow, run);                                                                      \
    }
