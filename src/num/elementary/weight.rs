//! The weights of a softmax in the tensor-core domains: a power of two, branch-free, in ten operations.

/// 1.5 · 2^16: subtracting from it rounds to a multiple of 1/128, whose count of 128ths then stands in the low
/// bits.
const ROUND: f32 = 98_304.0;

/// Minimax coefficients of `(2^(1 - 128 g) - 2) / g` for |g| ≤ 1/256, the constant first.
const Q: [f32; 4] = [
    f32::from_bits(0xc331_7096),
    f32::from_bits(0x45f6_01bc),
    f32::from_bits(0xc864_fe23),
    f32::from_bits(0x4a9d_0166),
];

/// `2^(1 - 128 x)` for `x` from 0 to 127/128, and from there `2^-126 · (2^(128 (1 - x)) - 1)` down to `+0.0` at 1. An
/// `x` outside 0 to 1 is moved to the nearer end, and a NaN to 0; what is not finite has to be seen before.
///
/// At 1 the polynomial's 2 loses its whole exponent and leaves `+0.0`; no other comparison is needed. The error is
/// below `2^-18` of the result up to 127/128, a hundredth of what rounding it to an operand costs.
#[inline(always)]
pub fn weight(x: f32) -> f32 {
    let u = if x > 0.0 { x } else { 0.0 };
    let u = if u < 1.0 { u } else { 1.0 };
    let t = ROUND - u;
    let n = t - ROUND;
    let g = u + n;
    let q = Q[3].mul_add(g, Q[2]);
    let q = q.mul_add(g, Q[1]);
    let q = q.mul_add(g, Q[0]);
    let p = q.mul_add(g, 2.0);
    f32::from_bits(p.to_bits().wrapping_add(t.to_bits() << 23))
}
