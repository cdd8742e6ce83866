// The sigmoid of SwiGLU in narrow storage: src/num/elementary/narrow_sigmoid.rs.
#pragma once
#include "contract.cuh"

namespace contract {

/// `weight` of src/num/elementary/weight.rs at `|x| * log2(e) / 128 + 1 / 128`, moved to 0 to 1, a NaN to 0: e^-|x|.
__device__ __forceinline__ float narrow_power(float x) {
    const float factor = from_bits(0x3c38aa3bu), one_at = 0.0078125f;
#ifdef BITSTEP_HOST
    const float at = __fmaf_rn(fabsf(x), factor, one_at), least = at > 0.0f ? at : 0.0f;
    const float u = least < 1.0f ? least : 1.0f;
#else
    float u;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(u) : "f"(fabsf(x)), "f"(factor), "f"(one_at));
#endif
    const float t = __fsub_rn(98304.0f, u), g = __fadd_rn(u, __fsub_rn(t, 98304.0f));
    float q = __fmaf_rn(from_bits(0x4a9d0166u), g, from_bits(0xc864fe23u));
    q = __fmaf_rn(q, g, from_bits(0x45f601bcu));
    q = __fmaf_rn(q, g, from_bits(0xc3317096u));
    q = __fmaf_rn(q, g, 2.0f);
    return from_bits(to_bits(q) + (to_bits(t) << 23));
}

/// `1 / (1 + e^-x)` to 2^-18 of itself.
__device__ __forceinline__ float narrow_sigmoid(float x) {
    const float w = narrow_power(x), d = __fadd_rn(1.0f, w);
    float y = __fmaf_rn(__fmaf_rn(from_bits(0x3ea57eb5u), w, from_bits(0xbf4ede62u)), w, from_bits(0x3f7d6a05u));
    y = __fmaf_rn(__fmaf_rn(negate(d), y, 1.0f), y, y);
    y = __fmaf_rn(__fmaf_rn(negate(d), y, 1.0f), y, y);
    return __fmul_rn(x < 0.0f ? w : 1.0f, y);
}

}  // namespace contract
