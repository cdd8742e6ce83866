//! `log` and `softplus`, branch-free.

use super::exp::NegativeExp;
use super::{LN2_HI, LN2_LO, NAN, canonical_nan};

/// The bits of 0.7, where the range of the reduced argument begins; it ends at 1.4.
const LEAST: u32 = 0x3f33_3333;
/// 2^23, which makes every subnormal number normal.
const LIFT: f32 = 8_388_608.0;

/// Minimax coefficients of `(log(1 + f) - f) / f²` for f from -0.3 to 0.4, the constant first.
const Q: [f32; 10] = [
    f32::from_bits(0xbf00_0000),
    f32::from_bits(0x3eaa_aaa3),
    f32::from_bits(0xbe7f_ffec),
    f32::from_bits(0x3e4c_d294),
    f32::from_bits(0xbe2a_b4b5),
    f32::from_bits(0x3e11_9e48),
    f32::from_bits(0xbdfd_1715),
    f32::from_bits(0x3df2_3074),
    f32::from_bits(0xbdf4_e58e),
    f32::from_bits(0x3d94_c001),
];

#[inline(always)]
fn polynomial(f: f32) -> f32 {
    let q = Q[9].mul_add(f, Q[8]);
    let q = q.mul_add(f, Q[7]);
    let q = q.mul_add(f, Q[6]);
    let q = q.mul_add(f, Q[5]);
    let q = q.mul_add(f, Q[4]);
    let q = q.mul_add(f, Q[3]);
    let q = q.mul_add(f, Q[2]);
    let q = q.mul_add(f, Q[1]);
    q.mul_add(f, Q[0])
}

/// The natural logarithm: `-inf` for both zeros, NaN below zero.
#[inline(always)]
pub fn log(x: f32) -> f32 {
    let subnormal = x < f32::MIN_POSITIVE;
    let bits = (if subnormal { x * LIFT } else { x }).to_bits();
    let e = bits.wrapping_sub(LEAST) as i32 >> 23;
    let f = f32::from_bits(bits.wrapping_sub((e as u32) << 23)) - 1.0;
    let n = e as f32 - if subnormal { 23.0 } else { 0.0 };
    // n · LN2_HI is exact, and f is smaller unless n is 0, so s and s_low add up to their exact sum.
    let hi = n * LN2_HI;
    let s = hi + f;
    let s_low = f - (s - hi);
    let low = n.mul_add(LN2_LO, s_low);
    let y = s + (f * f).mul_add(polynomial(f), low);
    let y = if x == f32::INFINITY { x } else { y };
    let y = if x == 0.0 { f32::NEG_INFINITY } else { y };
    let y = if x < 0.0 { NAN } else { y };
    canonical_nan(x, y)
}

/// `log(1 + e^x)`, computed as `max(x, 0) + log(1 + e^-|x|)` with the exponential and the sum carried in
/// two parts; below -20 it is `e^x`, above 20 it is `x`, to far less than an ulp.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    let e = NegativeExp::new(x);
    let (u, u_low) = e.sum();
    // 1 + u is 2 · (1 + f) or 1 + f, with f from -0.3 to 0.4.
    let upper = u > 0.4;
    let under = u - 1.0;
    let under_low = u - (under + 1.0);
    let f = if upper { 0.5 * under } else { u };
    let f_low = if upper {
        0.5 * (u_low + under_low)
    } else {
        u_low
    };
    let hi = if upper { LN2_HI } else { 0.0 };
    let ln2_low = if upper { LN2_LO } else { 0.0 };
    let s = hi + f;
    let s_low = f - (s - hi);
    let low = (s_low + ln2_low) + (-f).mul_add(f_low, f_low);
    let low = (f * f).mul_add(polynomial(f), low);
    // The exact sum of max(x, 0) and s, the larger first.
    let ramp = if x > 0.0 { x } else { 0.0 };
    let larger = if ramp > s { ramp } else { s };
    let smaller = if ramp > s { s } else { ramp };
    let sum = larger + smaller;
    let sum_low = smaller - (sum - larger);
    let y = sum + (sum_low + low);
    let y = if x > 20.0 { x } else { y };
    let y = if x < -20.0 { e.value() } else { y };
    canonical_nan(x, y)
}
