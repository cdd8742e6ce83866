// The sigmoid of kernels that are bound by it: the operations of contract.cuh and their bits, without a branch.
#pragma once
#include "contract.cuh"

namespace gates {

/// `1 / d` to nearest for `d` of 1 to 2. A guess that is good to an ulp and one step of Newton's, which is what the device's division
/// is for such a divisor; beyond it a division asks for the divisor's exponent, and no two of them overlap.
__device__ __forceinline__ float reciprocal(float d) {
#ifdef BITSTEP_HOST
    return __frcp_rn(d);
#else
    float inverse;
    asm("{.reg .f32 guess, rest, less;\n\t"
        "rcp.approx.ftz.f32 guess, %1;\n\t"
        "neg.f32 less, %1;\n\t"
        "fma.rn.f32 rest, less, guess, 0f3F800000;\n\t"
        "fma.rn.f32 %0, guess, rest, guess;}"
        : "=f"(inverse)
        : "f"(d));
    return inverse;
#endif
}

/// `1 / (1 + e^-x)`.
__device__ __forceinline__ float sigmoid(float x) {
    using contract::from_bits;
    const bool down = x < 0.0f;
    const contract::NegativeExp e(x);
    const float u = e.high();
    const float d = __fadd_rn(1.0f, u);
    const float d_low = __fadd_rn(__fsub_rn(u, __fsub_rn(d, 1.0f)), e.low());
    const float inverse = reciprocal(d);
    const float top = down ? e.hi : 1.0f;
    const float top_low = down ? e.lo : 0.0f;
    float q = __fmul_rn(top, inverse);
    float rest = __fadd_rn(__fmaf_rn(-q, d, top), top_low);
    rest = __fmaf_rn(-q, d_low, rest);
    q = __fmaf_rn(rest, inverse, q);
    q = down ? contract::scale_exp(q, e.n_bits, true) : q;
    return x != x ? from_bits(contract::NAN_BITS) : q;
}

}  // namespace gates
