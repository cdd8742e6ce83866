// The online softmax of the tensor-core domains: src/num/softmax.rs and src/num/elementary/weight.rs.
#pragma once
#include "contract.cuh"

namespace softmax {

// a · b + c, then moved to the nearer end of 0 to 1; a NaN becomes 0.
__device__ __forceinline__ float saturated(float a, float b, float c) {
#ifdef BITSTEP_HOST
    const float x = __fmaf_rn(a, b, c), least = x > 0.0f ? x : 0.0f;
    return least < 1.0f ? least : 1.0f;
#else
    float x;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(x) : "f"(a), "f"(b), "f"(c));
    return x;
#endif
}

// 2^(1 - 128 u) for u from 0 to 1.
__device__ __forceinline__ float weight(float u) {
    const float t = __fsub_rn(98304.0f, u), g = __fadd_rn(u, __fsub_rn(t, 98304.0f));
    float q = __fmaf_rn(contract::from_bits(0x4a9d0166u), g, contract::from_bits(0xc864fe23u));
    q = __fmaf_rn(q, g, contract::from_bits(0x45f601bcu));
    q = __fmaf_rn(q, g, contract::from_bits(0xc3317096u));
    q = __fmaf_rn(q, g, 2.0f);
    return contract::from_bits(contract::to_bits(q) + (contract::to_bits(t) << 23));
}

// The weight of a score beside a reference: `minus_k` is the score's factor, negated.
__device__ __forceinline__ float score_weight(float s, float minus_k, float reference) {
    return weight(saturated(s, minus_k, reference));
}

// Half the weight of a difference: by how much weights change from one reference to another.
__device__ __forceinline__ float half_weight(float difference) {
    return __fmul_rn(0.5f, weight(saturated(difference, 1.0f, 0.0f)));
}

// Whether the greatest score is not below a row's reference.
__device__ __forceinline__ bool passes(float score, float minus_k, float reference) {
    return !(contract::negate(__fmul_rn(score, minus_k)) <= reference);
}

// Raises the reference to the row's greatest score; a row's sums become fma(sum, factor, addend).
__device__ __forceinline__ void raise(float& reference, float& factor, float& addend, float top, float minus_k) {
    const float y = contract::negate(__fmul_rn(top, minus_k));
    const float raised = __fsub_rn(__fadd_rn(__fadd_rn(y, 0.015625f), 393216.0f), 393216.0f);
    factor = half_weight(__fsub_rn(raised, reference));
    addend = __fsub_rn(y, y);
    reference = raised;
}

}  // namespace softmax
