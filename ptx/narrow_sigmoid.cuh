// The sigmoid of SwiGLU in narrow storage: src/num/elementary/narrow_sigmoid.rs.
#pragma once
#include "softmax.cuh"

namespace contract {

/// `1 / (1 + e^-x)` to 2^-18 of itself.
__device__ __forceinline__ float narrow_sigmoid(float x) {
    // e^-|x|: the weight at |x| * log2(e) / 128 + 1 / 128.
    const float w = softmax::weight(softmax::saturated(fabsf(x), from_bits(0x3c38aa3bu), 0.0078125f));
    const float d = __fadd_rn(1.0f, w);
    float y = __fmaf_rn(__fmaf_rn(from_bits(0x3ea57eb5u), w, from_bits(0xbf4ede62u)), w, from_bits(0x3f7d6a05u));
    y = __fmaf_rn(__fmaf_rn(negate(d), y, 1.0f), y, y);
    y = __fmaf_rn(__fmaf_rn(negate(d), y, 1.0f), y, y);
    return __fmul_rn(x < 0.0f ? w : 1.0f, y);
}

}  // namespace contract
