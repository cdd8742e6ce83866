//! The elementary functions of the contract, each at most 1 ulp from the exact value for every input; but for
//! the softmax weights of the tensor-core domains and the sigmoid of their SwiGLU, which are rounded to bf16 or f16
//! afterwards.
//!
//! They use the operations of the contract's first rule alone: binary32 `+ - * / sqrt fma` rounded to
//! nearest even, integer operations and exact comparisons. Device code repeats them operation by
//! operation. The vectorisable ones hold no branch: every `if` selects between computed values.
//! A NaN result has the bits `0x7fc00000`.

mod accuracy;
mod exp;
mod log;
mod narrow_sigmoid;
mod trig;
mod weight;

pub use accuracy::{ACCURACY, Accuracy};
pub use exp::{LOG2_E, decay, exp, sigmoid};
pub use log::{log, softplus};
pub use narrow_sigmoid::narrow_sigmoid;
pub use trig::{cos, sin, sin_cos};
pub use weight::weight;

/// The only NaN that these functions return.
const NAN: f32 = f32::from_bits(0x7fc0_0000);
/// The sign bit.
const SIGN: u32 = 0x8000_0000;
/// ln 2 in two parts; the first has 15 significant bits, so that its product with an exponent is exact.
const LN2_HI: f32 = f32::from_bits(0x3f31_7200);
const LN2_LO: f32 = f32::from_bits(0x35bf_be8e);

/// `y`, or the canonical NaN where `x` is a NaN.
#[inline(always)]
fn canonical_nan(x: f32, y: f32) -> f32 {
    if x.is_nan() { NAN } else { y }
}
