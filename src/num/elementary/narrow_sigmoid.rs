//! The sigmoid of SwiGLU where its operands and results are stored in bf16 or f16: branch-free, without a division.

use super::weight;

/// `log2(e) / 128`, rounded once.
const UNITS: f32 = f32::from_bits(0x3c38_aa3b);
/// The argument at which [`weight`] is 1.
const ONE_AT: f32 = 1.0 / 128.0;

/// `(98 - 80 w + 32 w²) / 99`, the constant first: the quadratic nearest to `1 / (1 + w)` for w from 0 to 1 in relative
/// error, which is `1 / 99` of a Chebyshev polynomial of the third degree.
const SEED: [f32; 3] = [
    f32::from_bits(0x3f7d_6a05),
    f32::from_bits(0xbf4e_de62),
    f32::from_bits(0x3ea5_7eb5),
];

/// `1 / (1 + e^-x)` to `2^-17` of itself, and to `2^-18` up to `|x| = 20`, a 64th of what rounding to f16 costs; it ends
/// as [`weight`] does, at 1 and, for `x` from -87.34 down, at `+0.0`. A NaN gives `+0.0`: it is itself a
/// factor of what follows.
///
/// With `w = e^-|x|` the reciprocal of `1 + w` is a quadratic, and two steps of Newton's that square its error of 1/99.
#[inline(always)]
pub fn narrow_sigmoid(x: f32) -> f32 {
    let w = weight(x.abs().mul_add(UNITS, ONE_AT));
    let d = 1.0 + w;
    let y = SEED[2].mul_add(w, SEED[1]).mul_add(w, SEED[0]);
    let y = (-d).mul_add(y, 1.0).mul_add(y, y);
    let y = (-d).mul_add(y, 1.0).mul_add(y, y);
    let top = if x < 0.0 { w } else { 1.0 };
    top * y
}

#[cfg(test)]
mod tests {
    use super::narrow_sigmoid;
    use crate::num::element::{Bf16, Element, F16};

    /// A function of the contract, and the exact one.
    type Pair = (fn(f32) -> f32, fn(f64) -> f64);

    /// The largest distance of a stored result from the exact one, in units of the last place of what is stored,
    /// over all arguments that can be stored.
    fn worst<E: Element>(of_bits: fn(u16) -> E, unit: fn(f64) -> f64, (ours, exact): Pair) -> f64 {
        let arguments = (0..=u16::MAX).map(|bits| of_bits(bits).to_f32());
        let errors = arguments.filter(|x| x.abs() < 80.0).map(|x| {
            let (stored, exact) = (E::from_f32(ours(x)).to_f32(), exact(f64::from(x)));
            (f64::from(stored) - exact).abs() / unit(exact)
        });
        errors.fold(0.0, f64::max)
    }

    /// The unit in the last place of a number with so many bits, whose exponent is not below the least one.
    fn unit(x: f64, bits: i32, least: i32) -> f64 {
        let exponent = (x.abs().to_bits() >> 52) as i32 - 1023;
        libm::exp2(f64::from(exponent.max(least) - bits + 1))
    }

    fn bf16_unit(x: f64) -> f64 {
        unit(x, 8, -126)
    }

    fn f16_unit(x: f64) -> f64 {
        unit(x, 11, -14)
    }

    fn sigmoid(x: f64) -> f64 {
        1.0 / (1.0 + libm::exp(-x))
    }

    fn silu(x: f64) -> f64 {
        x * sigmoid(x)
    }

    fn narrow_silu(x: f32) -> f32 {
        x * narrow_sigmoid(x)
    }

    /// The factor of the gradient by the gate, as SwiGLU computes it. It passes zero, so it is measured beside 1.
    fn narrow_slope(x: f32) -> f32 {
        let s = narrow_sigmoid(x);
        1.0 + s * x.mul_add(1.0 - s, 1.0)
    }

    fn slope(x: f64) -> f64 {
        let s = sigmoid(x);
        1.0 + s * (1.0 + x * (1.0 - s))
    }

    /// Rounding alone costs half a unit; what the sigmoid adds is 2^-10 of one in bf16 and 2^-6 in f16.
    #[test]
    fn every_stored_result_is_the_rounded_one_to_a_small_part_of_a_unit() {
        let pairs: [Pair; 3] = [
            (narrow_sigmoid, sigmoid),
            (narrow_silu, silu),
            (narrow_slope, slope),
        ];
        for pair in pairs {
            let bf16 = worst(Bf16, bf16_unit, pair);
            let f16 = worst(F16, f16_unit, pair);
            assert!((0.49..0.502).contains(&bf16), "{bf16}");
            assert!((0.49..0.516).contains(&f16), "{f16}");
        }
    }

    /// Half a bit less of accuracy is seen.
    #[test]
    fn a_coarser_sigmoid_is_found() {
        let coarse = |x: f32| narrow_sigmoid(x) * (1.0 + 3e-5);
        assert!(worst(F16, f16_unit, (coarse, sigmoid)) > 0.516);
        assert!(
            worst(
                Bf16,
                bf16_unit,
                (|x| narrow_sigmoid(x) * (1.0 + 3e-5), sigmoid)
            ) > 0.502
        );
    }

    #[test]
    fn it_ends_at_zero_and_one_and_is_a_half_in_the_middle() {
        let cases = [
            (0.0, 0.5),
            (-0.0, 0.5),
            (1e-45, 0.5),
            (-1e-45, 0.5),
            (20.0, 1.0),
            (f32::MAX, 1.0),
            (f32::INFINITY, 1.0),
            (-88.1, 0.0),
            (f32::MIN, 0.0),
            (f32::NEG_INFINITY, 0.0),
            (f32::NAN, 0.0),
        ];
        for (x, expected) in cases {
            let found = narrow_sigmoid(x);
            assert_eq!(found.to_bits(), f32::to_bits(expected), "{x}: {found}");
        }
        // What is left far down is subnormal and still falls.
        let far: Vec<f32> = [-87.3, -87.5, -87.9].map(narrow_sigmoid).into();
        assert!(
            far[0] > far[1] && far[1] > far[2] && far[2] > 0.0,
            "{far:?}"
        );
        assert!(far[1] < f32::MIN_POSITIVE);
    }

    #[test]
    fn it_never_passes_one() {
        let within = |of_bits: fn(u16) -> f32| {
            let mut values = (0..=u16::MAX).map(of_bits).map(narrow_sigmoid);
            values.all(|s| (0.0..=1.0).contains(&s))
        };
        assert!(within(|bits| Bf16(bits).to_f32()));
        assert!(within(|bits| F16(bits).to_f32()));
    }
}
