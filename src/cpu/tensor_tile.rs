//! The tensor-core step over lanes of outputs: packed factors, and the register tile of the product.
//!
//! A packed factor is a signed significand and an exponent. A step over a lane takes the largest exponent,
//! scales each product so that one is the last bit kept, cuts it by conversion to an integer, and sums the
//! integers: all of it exact, so that lanes, paths and blocks decide no bit.

use crate::num::tensor_model::{LEAST_EXPONENT, StepModel, ZERO_ACCUMULATOR};
use crate::num::tensor_step::Kind;

/// Outputs that a tile computes side by side.
pub(super) const LANES: usize = 16;

/// Bits kept behind the leading position of the largest exponent.
pub(super) const FRACTION_BITS: i32 = StepModel::HOPPER.fraction_bits as i32;

/// The exponent field of the numbers from 1 on, in place.
pub(super) const FIELD_OF_ONE: i32 = 0x3f80_0000;

/// The exponent of a zero factor: it makes a product that no other exponent is as small as.
const ABSENT: i32 = -1000;

/// The least exponent field of a scale. Below it every product is cut to zero, and no product with it is
/// subnormal, which some processors are slow at.
pub(super) const LEAST_SCALE: i32 = 64;

/// A factor: `significand · 2^exponent`, exactly.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Factor {
    pub significand: f32,
    pub exponent: i32,
}

impl Factor {
    /// The factor that is zero, which pads tails and missing lanes.
    pub(super) const ZERO: Factor = Factor {
        significand: 0.0,
        exponent: ABSENT,
    };

    /// The factor of a finite number of the kind's format.
    #[inline(always)]
    pub(super) fn of(kind: Kind, x: f32) -> Factor {
        let bits = x.to_bits();
        let leading = (bits >> 23 & 255) as i32 - 127;
        let least = kind.least_exponent();
        let unscale = f32::from_bits(((127 - least) as u32) << 23);
        let normal = f32::from_bits(bits & 0x807f_ffff | 0x3f80_0000);
        let (significand, exponent) = match leading < least {
            true => (x * unscale, least),
            false => (normal, leading),
        };
        Factor {
            significand,
            exponent: if x == 0.0 { ABSENT } else { exponent },
        }
    }
}

/// One factor for each lane, of the same k.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct FactorLine {
    pub significands: [f32; LANES],
    pub exponents: [i32; LANES],
}

impl FactorLine {
    /// Zeros in every lane.
    pub(super) const ZERO: FactorLine = FactorLine {
        significands: [0.0; LANES],
        exponents: [ABSENT; LANES],
    };
}

/// Chains of steps over a panel: rows of A against [`LANES`] columns of B.
pub(super) struct Panel<'a> {
    pub kind: Kind,
    /// Row `r` has its factors at `r * k..(r + 1) * k`, k being a whole number of steps.
    pub a: &'a [Factor],
    /// `k` lines.
    pub b: &'a [FactorLine],
    /// Row `r` has its lanes at `r * stride..r * stride + LANES`; the chains go on from what is there.
    pub sums: &'a mut [f32],
    pub stride: usize,
}

impl Panel<'_> {
    /// Computes the panel in plain code, for a processor without the vector instructions.
    pub(super) fn run(self) {
        match self.kind {
            Kind::Bf16 | Kind::F16 => self.chains::<16>(),
            Kind::Tf32 => self.chains::<8>(),
        }
    }

    fn chains<const K: usize>(self) {
        let rows = self.a.chunks_exact(self.b.len().max(1));
        for (a, sums) in rows.zip(self.sums.chunks_mut(self.stride)) {
            let Some(sums) = sums.first_chunk_mut::<LANES>() else {
                return;
            };
            let mut acc = *sums;
            let (a_steps, _) = a.as_chunks::<K>();
            let (b_steps, _) = self.b.as_chunks::<K>();
            for (a, b) in a_steps.iter().zip(b_steps) {
                acc = step_lanes(&acc, a, b);
            }
            *sums = acc;
        }
    }
}

/// One step in every lane.
#[inline(always)]
fn step_lanes<const K: usize>(
    acc: &[f32; LANES],
    a: &[Factor; K],
    b: &[FactorLine; K],
) -> [f32; LANES] {
    let mut significands = [0.0; LANES];
    let mut largest = [0; LANES];
    for l in 0..LANES {
        (significands[l], largest[l]) = split(acc[l]);
    }
    let exponents = largest;
    for (a, b) in a.iter().zip(b) {
        for (largest, exponent) in largest.iter_mut().zip(b.exponents) {
            *largest = (*largest).max(a.exponent + exponent);
        }
    }
    let mut fields = [0; LANES];
    let mut starts = [0; LANES];
    for l in 0..LANES {
        fields[l] = 127 + FRACTION_BITS - largest[l];
        starts[l] = cut(significands[l], fields[l] + exponents[l]);
    }
    let mut sums = [0_i32; LANES];
    for (a, b) in a.iter().zip(b) {
        for l in 0..LANES {
            let product = a.significand * b.significands[l];
            sums[l] += cut(product, fields[l] + (a.exponent + b.exponents[l]));
        }
    }
    let mut out = [0.0; LANES];
    for l in 0..LANES {
        let finite = round(sums[l], starts[l], largest[l] - FRACTION_BITS);
        out[l] = if acc[l].is_finite() { finite } else { acc[l] };
    }
    out
}

/// The accumulator as significand and exponent; an infinity gives what nobody uses.
#[inline(always)]
fn split(x: f32) -> (f32, i32) {
    let bits = x.to_bits();
    let field = (bits >> 23 & 255) as i32;
    let one = f32::from_bits(bits & 0x8000_0000 | 0x3f80_0000);
    let normal = f32::from_bits(bits & 0x807f_ffff | 0x3f80_0000);
    match field {
        0 if x == 0.0 => (0.0, ZERO_ACCUMULATOR),
        0 => (normal - one, LEAST_EXPONENT),
        _ => (normal, field - 127),
    }
}

/// `significand` times the power of two with this exponent field, toward zero; its size is below 2^27.
#[inline(always)]
fn cut(significand: f32, field: i32) -> i32 {
    let scale = f32::from_bits((field.max(LEAST_SCALE) as u32) << 23);
    (significand * scale) as i32
}

/// `(products + start) · 2^unit`, toward zero.
///
/// The products' sum is below 2^31 in size: sixteen products below 4 with 25 fractional bits. The
/// accumulator adds at most 2^26, so the size of the whole fits 32 bits without a sign.
#[inline(always)]
fn round(products: i32, start: i32, unit: i32) -> f32 {
    let sum = products.wrapping_add(start);
    // The sign of the exact sum is the majority of three signs: a sum that wrapped has two equal terms.
    let negative = ((products & start) | ((products | start) & sum)) >> 31;
    let size = (sum ^ negative).wrapping_sub(negative) as u32;
    let sign = (negative as u32) & 0x8000_0000;
    // To the nearest from two exact halves, and a last place back where that went up.
    let high = (size >> 8) as i32 as f32 * 256.0;
    let low = (size & 255) as i32 as f32;
    let nearest = high + low;
    let went_up = u32::from(nearest - high > low);
    let rounded = nearest.to_bits().wrapping_sub(went_up);
    let field = (rounded >> 23) as i32 + unit;
    let normal = (rounded as i32).wrapping_add(unit.wrapping_shl(23)) as u32;
    // In units of the least subnormal number, 2^-149; what is aligned lower is cut at it.
    let up = unit + 149;
    let subnormal = match up < 0 {
        true => size >> (-up as u32 & 31),
        false => size << (up as u32 & 31),
    };
    let bits = match (field <= 0 || size == 0, field >= 255) {
        (true, _) => subnormal,
        (_, true) => 0x7f80_0000,
        _ => normal,
    };
    f32::from_bits(bits | sign)
}
