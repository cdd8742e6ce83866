//! `sin` and `cos`: one reduction in integers for every argument above π/4 (Payne and Hanek, "Radian
//! reduction for trigonometric functions", SIGNUM 1983), then a polynomial in two-part arithmetic.

use super::{NAN, SIGN};

/// The bits of 2/π after the binary point, behind 32 zeros that serve small exponents.
const TWO_OVER_PI: [u32; 9] = [
    0,
    0xa2f9_836e,
    0x4e44_1529,
    0xfc27_57d1,
    0xf534_ddc0,
    0xdb62_9599,
    0x3c43_9041,
    0xfe51_63ab,
    0xdebb_c561,
];
/// The bits of π/4 rounded to nearest: up to it no reduction is needed.
const QUARTER_PI: u32 = 0x3f49_0fdb;
/// π/2 in two parts, each divided by 2^23.
const HALF_PI_HI: f32 = f32::from_bits(0x3fc9_0fdb - (23 << 23));
const HALF_PI_LO: f32 = f32::from_bits(0xb33b_bd2e - (23 << 23));
const TWO_POW_M24: f32 = f32::from_bits((127 - 24) << 23);

/// Minimax coefficients of `(sin r - r) / r³` in r² for |r| ≤ π/4, the constant first.
const SIN: [f32; 4] = [
    f32::from_bits(0xbe2a_aaab),
    f32::from_bits(0x3c08_88ba),
    f32::from_bits(0xb950_2cab),
    f32::from_bits(0x363e_16d1),
];
/// Minimax coefficients of `(cos r - 1 + r²/2) / r⁴` in r² for |r| ≤ π/4, the constant first.
const COS: [f32; 3] = [
    f32::from_bits(0x3d2a_aaa5),
    f32::from_bits(0xbab6_0614),
    f32::from_bits(0x37cc_f406),
];

/// `|x| = quadrant · π/2 + sign · (hi + lo)` modulo 2π, with `hi` from 0 to π/4.
struct Reduced {
    quadrant: u32,
    hi: f32,
    lo: f32,
    /// Whether the remainder is negative.
    negative: bool,
}

/// Reduces the finite number with bits `x`, the sign bit clear.
fn reduce(x: u32) -> Reduced {
    if x <= QUARTER_PI {
        return Reduced {
            quadrant: 0,
            hi: f32::from_bits(x),
            lo: 0.0,
            negative: false,
        };
    }
    // |x| = mantissa · 2^(exponent - 150), and exponent is at least 126 here. The 96 bits of 2/π whose
    // weights in the product with 2^(exponent - 150) run from 2 down to 2^-94 start at this bit.
    let (mantissa, exponent) = ((x & 0x007f_ffff) | 0x0080_0000, x >> 23);
    let start = exponent - 120;
    let (word, shift) = ((start / 32) as usize, start % 32);
    let take = |i: usize| {
        let two = u64::from(TWO_OVER_PI[word + i]) << 32 | u64::from(TWO_OVER_PI[word + i + 1]);
        (two << shift >> 32) as u32
    };
    let high = u64::from(mantissa.wrapping_mul(take(0))) << 32;
    let middle = u64::from(mantissa) * u64::from(take(1));
    let low = (u64::from(mantissa) * u64::from(take(2))) >> 32;
    // Quarter turns modulo 4: two bits before the binary point, 62 after it.
    let turns = high.wrapping_add(middle).wrapping_add(low);
    let quadrant = (turns.wrapping_add(1 << 61) >> 62) as u32;
    let rest = turns.wrapping_sub(u64::from(quadrant) << 62) as i64;
    // The rest is never 0: no binary32 number but 0 comes that close to a multiple of π/2.
    let size = rest.unsigned_abs();
    let zeros = size.leading_zeros();
    let digits = size << zeros;
    let top = (digits >> 40) as u32 as f32;
    let next = (digits >> 16) as u32 & 0x00ff_ffff;
    let next = next as f32 * TWO_POW_M24;
    // top · 2^-23 has the weight 2^(1 - zeros).
    let weight = f32::from_bits((128 - zeros) << 23);
    let hi = top * HALF_PI_HI;
    let lo = top.mul_add(HALF_PI_HI, -hi);
    let lo = next.mul_add(HALF_PI_HI, top.mul_add(HALF_PI_LO, lo));
    Reduced {
        quadrant,
        hi: hi * weight,
        lo: lo * weight,
        negative: rest < 0,
    }
}

/// The sine and the cosine of `x` in radians; NaN for infinities and NaN.
pub fn sin_cos(x: f32) -> (f32, f32) {
    let bits = x.to_bits() & !SIGN;
    if bits >= 0x7f80_0000 {
        return (NAN, NAN);
    }
    let Reduced {
        quadrant,
        hi,
        lo,
        negative,
    } = reduce(bits);
    let square = hi * hi;
    let q = SIN[3].mul_add(square, SIN[2]);
    let q = q.mul_add(square, SIN[1]);
    let q = q.mul_add(square, SIN[0]);
    let s = hi + (square * hi).mul_add(q, lo);
    let q = COS[2].mul_add(square, COS[1]);
    let q = q.mul_add(square, COS[0]);
    let half = 0.5 * square;
    let c = 1.0 - half;
    let c_low = (1.0 - c) - half;
    let c = c + (square * square).mul_add(q, (-hi).mul_add(lo, c_low));
    let s = s.to_bits() ^ if negative { SIGN } else { 0 };
    let c = c.to_bits();
    let (sine, cosine) = match quadrant & 3 {
        0 => (s, c),
        1 => (c, s ^ SIGN),
        2 => (s ^ SIGN, c ^ SIGN),
        _ => (c ^ SIGN, s),
    };
    let sign = x.to_bits() & SIGN;
    (f32::from_bits(sine ^ sign), f32::from_bits(cosine))
}

/// The sine of `x` in radians.
pub fn sin(x: f32) -> f32 {
    sin_cos(x).0
}

/// The cosine of `x` in radians.
pub fn cos(x: f32) -> f32 {
    sin_cos(x).1
}
