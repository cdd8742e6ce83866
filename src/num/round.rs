//! Rounding of binary32 to bf16, f16 and tf32, to nearest with ties to even, and widening back.
//!
//! Integer operations alone, so that every machine gives the same bits; a NaN becomes the canonical NaN
//! of its format, and what is too large becomes an infinity.

/// The bits of `+inf`, above which (without the sign) stand the NaNs.
const INFINITY: u32 = 0x7f80_0000;
/// The canonical NaN of binary32.
const NAN: u32 = 0x7fc0_0000;
/// The canonical NaN of bf16.
const BF16_NAN: u16 = 0x7fc0;
/// The canonical NaN of f16.
const F16_NAN: u16 = 0x7e00;
/// The bits of `+inf` in f16.
const F16_INFINITY: u16 = 0x7c00;
/// Mantissa bits that tf32 lacks.
const TF32_DROPPED: u32 = 13;
/// The difference of the exponent biases of binary32 and f16, in place.
const F16_BIAS: u32 = (127 - 15) << 23;

/// `bits` without its low `dropped` bits (1 to 31), rounded to nearest even; a carry moves upward.
#[inline(always)]
fn shift_to_even(bits: u32, dropped: u32) -> u32 {
    let odd = bits >> dropped & 1;
    (bits + (1 << (dropped - 1)) - 1 + odd) >> dropped
}

/// Whether the number with these bits is a NaN.
#[inline(always)]
fn is_nan(bits: u32) -> bool {
    bits & 0x7fff_ffff > INFINITY
}

/// The bits of the bf16 nearest to `x`.
#[inline(always)]
pub fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16 & 0x8000) as u16;
    let rounded = shift_to_even(bits & 0x7fff_ffff, 16) as u16 | sign;
    if is_nan(bits) { BF16_NAN } else { rounded }
}

/// The value of a bf16, exactly.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    let wide = u32::from(bits) << 16;
    f32::from_bits(if is_nan(wide) { NAN } else { wide })
}

/// The tf32 nearest to `x`: a binary32 whose low 13 bits are zero.
#[inline(always)]
pub fn f32_to_tf32(x: f32) -> f32 {
    let bits = x.to_bits();
    let sign = bits & 0x8000_0000;
    let rounded = shift_to_even(bits & 0x7fff_ffff, TF32_DROPPED) << TF32_DROPPED | sign;
    f32::from_bits(if is_nan(bits) { NAN } else { rounded })
}

/// The bits of the f16 nearest to `x`.
pub fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    if is_nan(bits) {
        return F16_NAN;
    }
    let sign = (bits >> 16 & 0x8000) as u16;
    let size = bits & 0x7fff_ffff;
    let (exponent, mantissa) = (size >> 23, (size & 0x007f_ffff) | 0x0080_0000);
    let rounded = match exponent {
        // Below 2^-25 everything rounds to zero; a subnormal f16 counts in units of 2^-24.
        0..=101 => 0,
        102..=112 => shift_to_even(mantissa, 126 - exponent) as u16,
        113..=142 => shift_to_even(size - F16_BIAS, 13) as u16,
        _ => F16_INFINITY,
    };
    sign | rounded
}

/// The value of an f16, exactly.
pub fn f16_to_f32(bits: u16) -> f32 {
    /// 2^-24, the unit of the subnormal numbers.
    const UNIT: f32 = f32::from_bits((127 - 24) << 23);
    let sign = u32::from(bits & 0x8000) << 16;
    let (exponent, mantissa) = (bits >> 10 & 31, u32::from(bits & 0x03ff));
    let wide = match (exponent, mantissa) {
        (0, m) => (m as f32 * UNIT).to_bits(),
        (31, 0) => INFINITY,
        (31, _) => return f32::from_bits(NAN),
        _ => (u32::from(bits & 0x7fff) << 13) + F16_BIAS,
    };
    f32::from_bits(sign | wide)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// Every 997th number, and those around every value, tie and end of the narrow formats.
    fn inputs() -> impl Iterator<Item = f32> {
        let strided = (0..1_u64 << 32).step_by(997).map(|b| b as u32);
        let around = |b: u32| (0..7).map(move |d| b.wrapping_add(d).wrapping_sub(3));
        let ties = (0..1_u32 << 20).flat_map(move |i| around(i << 12));
        let ends = [
            0,
            0x3300_0000,
            0x3880_0000,
            0x477f_f000,
            0x7f7f_8000,
            INFINITY,
        ]
        .into_iter()
        .flat_map(around);
        strided.chain(ties).chain(ends).map(f32::from_bits)
    }

    #[test]
    fn widening_is_exact_for_all_bits() {
        for b in 0..=u16::MAX {
            let (f, g) = (f16::from_bits(b), bf16::from_bits(b));
            let expect = |nan: bool, x: f32| if nan { NAN } else { x.to_bits() };
            assert_eq!(f16_to_f32(b).to_bits(), expect(f.is_nan(), f.to_f32()));
            assert_eq!(bf16_to_f32(b).to_bits(), expect(g.is_nan(), g.to_f32()));
        }
    }

    #[test]
    fn narrowing_equals_the_half_crate() {
        for x in inputs() {
            let (f, g) = (f16::from_f32(x), bf16::from_f32(x));
            let f = if x.is_nan() { F16_NAN } else { f.to_bits() };
            let g = if x.is_nan() { BF16_NAN } else { g.to_bits() };
            assert_eq!(f32_to_f16(x), f, "f16 of {:08x}", x.to_bits());
            assert_eq!(f32_to_bf16(x), g, "bf16 of {:08x}", x.to_bits());
        }
    }

    /// tf32 by the definition: the nearer of the two neighbours with 13 zero bits, else the even one.
    fn tf32_by_distance(x: f32) -> u32 {
        let bits = x.to_bits();
        if x.is_nan() {
            return NAN;
        }
        let below = bits & !0x1fff;
        match (bits & 0x1fff).cmp(&0x1000) {
            std::cmp::Ordering::Less => below,
            std::cmp::Ordering::Greater => below + 0x2000,
            std::cmp::Ordering::Equal if below & 0x2000 == 0 => below,
            std::cmp::Ordering::Equal => below + 0x2000,
        }
    }

    #[test]
    fn tf32_is_the_nearest_and_rounds_ties_to_even() {
        for x in inputs() {
            let got = f32_to_tf32(x).to_bits();
            assert_eq!(got, tf32_by_distance(x), "tf32 of {:08x}", x.to_bits());
        }
        assert_eq!(f32_to_tf32(f32::MAX), f32::INFINITY);
        assert_eq!(f32_to_tf32(f32::MIN), f32::NEG_INFINITY);
    }

    #[test]
    fn ties_subnormals_and_overflow() {
        let f16_of = |x: f32| f32_to_f16(x);
        assert_eq!(f16_of(65_519.996), 0x7bff);
        assert_eq!(f16_of(65_520.0), F16_INFINITY);
        assert_eq!(f16_of(-1e30), F16_INFINITY | 0x8000);
        assert_eq!(f16_of(2.0_f32.powi(-25)), 0);
        assert_eq!(f16_of(1.5 * 2.0_f32.powi(-25)), 1);
        assert_eq!(f16_of(1.5 * 2.0_f32.powi(-24)), 2);
        assert_eq!(f16_of(-0.0), 0x8000);
        assert_eq!(f32_to_bf16(f32::MAX), 0x7f80);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f80_8000)), 0x3f80);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f81_8000)), 0x3f82);
    }
}
