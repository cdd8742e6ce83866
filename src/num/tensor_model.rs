//! Models of one tensor-core step, in integers alone: what the contract's step is, and what else it could be.
//!
//! A step adds K exact products to an accumulator in one fused operation. Every term is a significand with
//! an exponent; a product's exponent is the sum of its factors' exponents and its significand is not
//! normalised first, so it may be just below 4. All terms are aligned to the largest exponent, cut toward
//! zero to a fixed number of fractional bits, summed exactly, and the sum is cut toward zero to binary32.
//!
//! [`StepModel::HOPPER`] is the contract. The other values exist for the probe, which asks a device which
//! model its instructions follow.

use crate::num::tensor_step::Kind;

/// The exponent of the least normal number of binary32, and of its subnormal numbers.
pub const LEAST_EXPONENT: i32 = -126;

/// The exponent at which an accumulator of zero stands. Products of less are cut at it.
pub const ZERO_ACCUMULATOR: i32 = -133;

/// The canonical NaN: a step whose result is not a number gives these bits whatever the device stores.
pub const NAN: f32 = f32::from_bits(0x7fc0_0000);

/// What a product with a factor of zero does to the alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroProduct {
    /// It is absent: only terms that are not zero decide the largest exponent.
    Absent,
    /// It counts with the sum of its factors' exponents, a zero having that of the subnormal numbers.
    Aligns,
}

/// The least exponent that terms are aligned to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Floor {
    /// That of an accumulator of zero, whatever the products are.
    OfZero(i32),
    /// None: an accumulator of zero is absent like a product of zero.
    None,
}

/// What becomes of subnormal numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subnormals {
    /// They count as what they are, with the least exponent of their format.
    Kept,
    /// They count as what they are, with the exponent of their leading bit.
    Normalised,
    /// They count as zero.
    Flushed,
}

/// What a product of finite factors beyond the finite numbers counts as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugeProduct {
    /// What it is.
    Exact,
    /// An infinity of its sign.
    Infinite,
}

/// What a sum beyond the finite numbers becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overflow {
    /// An infinity of its sign.
    Infinity,
    /// The largest finite number of its sign.
    Largest,
}

/// The sign of a sum of zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroSum {
    /// Always positive.
    Positive,
    /// Negative when the accumulator and every product are zeros of negative sign.
    NegativeOfNegatives,
}

/// How the aligned sum becomes a binary32 number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// Toward zero.
    TowardZero,
    /// To the nearest, ties to even.
    NearestEven,
}

/// Everything that decides the bits of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepModel {
    /// Bits kept behind the leading position of the largest exponent.
    pub fraction_bits: u32,
    /// Products fused at a time; a multiple of it makes several fused sums in a row.
    pub fused: usize,
    pub zero_product: ZeroProduct,
    pub floor: Floor,
    /// Subnormal factors of products.
    pub factors: Subnormals,
    /// A subnormal accumulator.
    pub accumulator: Subnormals,
    /// Subnormal results; `Normalised` means `Kept` here.
    pub results: Subnormals,
    /// Products of at least 2^128.
    pub huge_product: HugeProduct,
    /// Sums of at least 2^128.
    pub overflow: Overflow,
    pub zero_sum: ZeroSum,
    pub rounding: Rounding,
}

impl StepModel {
    /// The step of the contract's domains `bf16.sm90`, `f16.sm90` and `tf32.sm90`.
    pub const HOPPER: StepModel = StepModel {
        fraction_bits: 25,
        fused: 16,
        zero_product: ZeroProduct::Absent,
        floor: Floor::OfZero(ZERO_ACCUMULATOR),
        factors: Subnormals::Kept,
        accumulator: Subnormals::Kept,
        results: Subnormals::Kept,
        huge_product: HugeProduct::Exact,
        overflow: Overflow::Infinity,
        zero_sum: ZeroSum::Positive,
        rounding: Rounding::TowardZero,
    };

    /// `acc + Σ a_i · b_i` by this model; the shorter of `a` and `b` decides the number of products.
    ///
    /// The values are numbers of the kind's format, held in binary32.
    pub fn step(&self, kind: Kind, acc: f32, a: &[f32], b: &[f32]) -> f32 {
        let parts = a.chunks(self.fused).zip(b.chunks(self.fused));
        parts.fold(acc, |acc, (a, b)| self.fused_sum(kind, acc, (a, b)))
    }

    fn fused_sum(&self, kind: Kind, acc: f32, (a, b): (&[f32], &[f32])) -> f32 {
        let pairs = || a.iter().copied().zip(b.iter().copied());
        if let Some(special) = special(acc, pairs().map(|(x, y)| self.saturated(x, y))) {
            return special;
        }
        let (acc_exponent, acc_size) = self.split(acc, LEAST_EXPONENT, self.accumulator);
        let mut largest = match self.floor {
            Floor::OfZero(least) if acc_size == 0 => least,
            Floor::OfZero(_) => acc_exponent,
            Floor::None if acc_size == 0 => i32::MIN,
            Floor::None => acc_exponent,
        };
        for (x, y) in pairs() {
            let (exponent, size) = self.product(kind, x, y);
            if size != 0 || self.zero_product == ZeroProduct::Aligns {
                largest = largest.max(exponent);
            }
        }
        if largest == i32::MIN {
            return self.zero(acc, pairs());
        }
        // Sizes have 46 fractional bits for products and 23 for the accumulator.
        let cut = |size: u64, fraction: i32, exponent: i32, negative: bool| {
            let drop = fraction - self.fraction_bits as i32 + (largest - exponent);
            let kept = match drop {
                _ if size == 0 => 0,
                64.. => 0,
                0..64 => size >> drop,
                _ => size << -drop,
            } as i64;
            if negative { -kept } else { kept }
        };
        let start = cut(acc_size, 23, acc_exponent, acc.is_sign_negative());
        let sum = pairs().fold(start, |sum, (x, y)| {
            let (exponent, size) = self.product(kind, x, y);
            sum + cut(
                size,
                46,
                exponent,
                x.is_sign_negative() != y.is_sign_negative(),
            )
        });
        match sum {
            0 => self.zero(acc, pairs()),
            _ => self.round(sum, largest - self.fraction_bits as i32),
        }
    }

    /// The factors, or those of an infinity where the model makes one of their product.
    fn saturated(&self, x: f32, y: f32) -> (f32, f32) {
        /// 2^128.
        const HUGE: f64 = f64::from_bits((1023 + 128) << 52);
        if self.huge_product == HugeProduct::Exact {
            return (x, y);
        }
        let product = f64::from(x) * f64::from(y);
        match product.is_finite() && product.abs() >= HUGE {
            true => (f32::INFINITY.copysign(product as f32), 1.0),
            false => (x, y),
        }
    }

    /// Exponent and size of the product of two factors; the size has 46 fractional bits.
    fn product(&self, kind: Kind, x: f32, y: f32) -> (i32, u64) {
        let (x_exponent, x_size) = self.split(x, kind.least_exponent(), self.factors);
        let (y_exponent, y_size) = self.split(y, kind.least_exponent(), self.factors);
        (x_exponent + y_exponent, x_size * y_size)
    }

    /// A finite number as `size · 2^(exponent - 23)`, the exponent being at least `least`.
    fn split(&self, x: f32, least: i32, subnormals: Subnormals) -> (i32, u64) {
        let bits = x.to_bits() & 0x7fff_ffff;
        let (field, fraction) = ((bits >> 23) as i32, u64::from(bits & 0x007f_ffff));
        let (mut exponent, mut size) = match field {
            0 => (LEAST_EXPONENT, fraction),
            _ => (field - 127, fraction | 1 << 23),
        };
        if size == 0 {
            return (least, 0);
        }
        let leading = exponent - (size.leading_zeros() as i32 - 40);
        match subnormals {
            Subnormals::Flushed if leading < least => (least, 0),
            Subnormals::Normalised => (leading, size << (exponent - leading)),
            _ => {
                let up = least - exponent;
                if up > 0 {
                    size >>= up.min(63);
                    exponent = least;
                }
                (exponent, size)
            }
        }
    }

    /// `sum · 2^unit` as a binary32 number; the sum is not zero.
    fn round(&self, sum: i64, unit: i32) -> f32 {
        let sign = ((sum < 0) as u32) << 31;
        let size = sum.unsigned_abs();
        let leading = unit + 63 - size.leading_zeros() as i32;
        // The least bit of the result: 23 below the leading one, or the least there is.
        let least = leading.max(LEAST_EXPONENT) - 23;
        let drop = least - unit;
        let mut kept = match drop {
            64.. => 0,
            0..64 => size >> drop,
            _ => size << -drop,
        };
        if self.rounding == Rounding::NearestEven && (1..64).contains(&drop) {
            let (rest, half) = (size & ((1 << drop) - 1), 1_u64 << (drop - 1));
            kept += u64::from(rest > half || (rest == half && kept & 1 == 1));
        }
        if kept < 1 << 23 {
            return match self.results {
                Subnormals::Flushed => f32::from_bits(sign),
                _ => f32::from_bits(sign | kept as u32),
            };
        }
        // A carry of the rounding moves into the exponent, as it should.
        let bits = (i64::from(least) + 23 + 126) << 23;
        let bits = (bits + kept as i64).min(0x7f80_0000) as u32;
        match (bits, self.overflow) {
            (0x7f80_0000, Overflow::Largest) => f32::from_bits(sign | 0x7f7f_ffff),
            _ => f32::from_bits(sign | bits),
        }
    }

    /// The zero that a sum of zero becomes.
    fn zero(&self, acc: f32, pairs: impl Iterator<Item = (f32, f32)>) -> f32 {
        let negative = |x: f32, y: f32| x.is_sign_negative() != y.is_sign_negative();
        let mut all = acc == 0.0 && acc.is_sign_negative();
        for (x, y) in pairs {
            all &= (x == 0.0 || y == 0.0) && negative(x, y);
        }
        match self.zero_sum {
            ZeroSum::NegativeOfNegatives if all => -0.0,
            _ => 0.0,
        }
    }
}

/// The result where an infinity or a NaN takes part; `None` where all values are finite.
///
/// NaN when a value is NaN, an infinity meets a zero factor, or infinite terms of both signs meet; the
/// infinity otherwise. Terms that are finite decide nothing, however large.
fn special(acc: f32, pairs: impl Iterator<Item = (f32, f32)>) -> Option<f32> {
    let (mut up, mut down, mut nan) = (false, false, acc.is_nan());
    let mut infinite = |negative: bool| {
        up |= !negative;
        down |= negative;
    };
    if acc.is_infinite() {
        infinite(acc.is_sign_negative());
    }
    for (x, y) in pairs {
        nan |= x.is_nan() || y.is_nan();
        if x.is_infinite() || y.is_infinite() {
            nan |= x == 0.0 || y == 0.0;
            infinite(x.is_sign_negative() != y.is_sign_negative());
        }
    }
    match (nan || (up && down), up, down) {
        (true, _, _) => Some(NAN),
        (_, true, _) => Some(f32::INFINITY),
        (_, _, true) => Some(f32::NEG_INFINITY),
        _ => None,
    }
}
