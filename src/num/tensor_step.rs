//! The tensor-core step of the contract's Hopper domains, and the chain of steps.
//!
//! A step takes an accumulator and K pairs of factors that are already numbers of its format:
//! `step(acc, a, b) = acc + Σ a_i · b_i`, computed as one fused sum ([`StepModel::HOPPER`]):
//!
//! 1. A factor is a significand with an exponent; subnormal numbers have the least exponent of their format
//!    (-126 for bf16 and tf32, -14 for f16) and a significand below 1. A product is exact, its exponent the
//!    sum of its factors' exponents; it is not normalised, so its significand lies below 4.
//! 2. All terms are aligned to the largest exponent E of the accumulator and of the products that are not
//!    zero, and cut toward zero to multiples of `2^(E - 25)`. An accumulator of zero has the exponent -133.
//! 3. The cut terms are summed exactly, and the sum is cut toward zero to binary32, subnormal numbers
//!    included.
//!
//! | case | rule | basis |
//! |---|---|---|
//! | normal numbers, 25 bits, one sum over all K, rounding toward zero | as above | measured |
//! | a product with a zero factor | absent: it moves no exponent | the probe |
//! | an accumulator of zero | aligned at -133, so it moves no exponent above that | the probe |
//! | subnormal factors, accumulators and results | kept, as in 1 to 3 | the probe |
//! | a sum of zero, by cancellation or from zeros of any sign | `+0.0` | the probe |
//! | a sum of at least `2^128` | the infinity of its sign | the probe |
//! | products above `2^128` that cancel | the exact sum | the probe |
//! | an infinite factor or accumulator | that infinity; NaN when both signs meet or the other factor is zero | the probe |
//! | NaN | the canonical NaN `7fc00000`, whatever the device stores: no NaN is ever stored or hashed | by rule |
//!
//! "The probe" is the device test of this module: it compares every line with the device's instructions.

use crate::num::round::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16, f32_to_tf32};
use crate::num::tensor_model::StepModel;
use crate::shape::Math;

/// The format of a step's factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// 8 exponent bits, 7 fractional bits; 16 products a step.
    Bf16,
    /// 5 exponent bits, 10 fractional bits; 16 products a step.
    F16,
    /// 8 exponent bits, 10 fractional bits, held in a binary32; 8 products a step.
    Tf32,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 3] = [Kind::Bf16, Kind::F16, Kind::Tf32];

    /// The kind of step that products in `math` are chains of; `None` for chains of fused multiply-adds.
    pub const fn of(math: Math) -> Option<Kind> {
        match math {
            Math::F32 => None,
            Math::Tf32 => Some(Kind::Tf32),
            Math::Bf16 => Some(Kind::Bf16),
            Math::F16 => Some(Kind::F16),
        }
    }

    /// Products of one step.
    pub const fn k(self) -> usize {
        match self {
            Kind::Bf16 | Kind::F16 => 16,
            Kind::Tf32 => 8,
        }
    }

    /// The exponent of the format's least normal number and of its subnormal numbers.
    pub const fn least_exponent(self) -> i32 {
        match self {
            Kind::Bf16 | Kind::Tf32 => -126,
            Kind::F16 => -14,
        }
    }

    /// The number of this format nearest to `x`, ties to even, as a binary32; a NaN becomes canonical.
    #[inline(always)]
    pub fn round(self, x: f32) -> f32 {
        match self {
            Kind::Bf16 => bf16_to_f32(f32_to_bf16(x)),
            Kind::F16 => f16_to_f32(f32_to_f16(x)),
            Kind::Tf32 => f32_to_tf32(x),
        }
    }

    /// The format's name, which a recipe's key and a domain start with.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Bf16 => "bf16",
            Kind::F16 => "f16",
            Kind::Tf32 => "tf32",
        }
    }
}

/// One step: `acc + Σ a_i · b_i` over at most [`Kind::k`] pairs; fewer are padded with zeros.
///
/// The factors are numbers of the kind's format ([`Kind::round`]).
///
/// # Panics
/// When there are more pairs than a step takes, or `a` and `b` differ in length.
pub fn step(kind: Kind, acc: f32, a: &[f32], b: &[f32]) -> f32 {
    assert!(a.len() == b.len() && a.len() <= kind.k());
    StepModel::HOPPER.step(kind, acc, a, b)
}

/// The chain of steps over the pairs in ascending order from `acc`, the short tail padded with zeros.
///
/// A padded product is zero and so absent, which is why a tail needs no rule of its own.
///
/// # Panics
/// When `a` and `b` differ in length.
pub fn chain(kind: Kind, acc: f32, a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let steps = a.chunks(kind.k()).zip(b.chunks(kind.k()));
    steps.fold(acc, |acc, (a, b)| step(kind, acc, a, b))
}

#[cfg(test)]
#[path = "tensor_step_tests.rs"]
mod tests;
