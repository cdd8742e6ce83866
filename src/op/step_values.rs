//! What changes every step and what every step reports, as plain words in two slots.
//!
//! A graph holds no scalar of its own: whatever a step needs anew is written into the scalars slot
//! before the launch, and whatever the host wants to know is read from the report slot after it.

use bytemuck::{Pod, Zeroable};

/// Words of the scalars slot.
pub const SCALAR_WORDS: usize = 8;
/// Words of the report slot.
pub const REPORT_WORDS: usize = 8;

/// The values written before each step. Each is computed in f64 on the host and rounded once.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct StepScalars {
    /// Learning rate of this step.
    pub lr: f32,
    /// `1 / (1 - beta1^t)`.
    pub bias_correction1: f32,
    /// `1 / (1 - beta2^t)`.
    pub bias_correction2: f32,
    /// `1 - lr · weight_decay`.
    pub decay: f32,
    /// The norm gradients are clipped to; infinity for no clipping.
    pub max_norm: f32,
    /// A step with a larger norm is dropped whole; infinity for no limit.
    pub spike_norm: f32,
    /// One over the loss normaliser: the targets that are not ignored, or the caller's own number.
    pub inv_normaliser: f32,
    /// Factor on the loss before backward; 1 outside f16.
    pub loss_scale: f32,
}

bitflags::bitflags! {
    /// Why a step was not applied; empty for an applied one.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Dropped: u32 {
        /// The loss was infinite or not a number.
        const NON_FINITE_LOSS = 1;
        /// The gradient norm was infinite or not a number.
        const NON_FINITE_NORM = 2;
        /// The gradient norm was above the spike limit.
        const SPIKE = 4;
    }
}

/// The report slot. Floats are bit patterns, and a NaN is always the canonical one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ReportWords {
    pub loss: u32,
    pub grad_norm: u32,
    pub clip_coefficient: u32,
    /// 1 when the step is applied, 0 when it is dropped.
    pub applied: u32,
    /// [`Dropped`] bits.
    pub dropped: u32,
    pub reserved: [u32; 3],
}

/// The one NaN that may be stored.
pub const CANONICAL_NAN: u32 = 0x7fc0_0000;

/// The bits of `x`, with every NaN as the canonical one.
pub fn canonical_bits(x: f32) -> u32 {
    if x.is_nan() {
        CANONICAL_NAN
    } else {
        x.to_bits()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_structs_fill_their_slots() {
        assert_eq!(size_of::<StepScalars>(), SCALAR_WORDS * 4);
        assert_eq!(size_of::<ReportWords>(), REPORT_WORDS * 4);
    }

    #[test]
    fn every_nan_is_stored_as_one() {
        assert_eq!(canonical_bits(f32::from_bits(0xffc0_1234)), CANONICAL_NAN);
        assert_eq!(canonical_bits(-0.0), 0x8000_0000);
    }
}
