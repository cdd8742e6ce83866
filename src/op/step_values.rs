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
    /// Always 1: the loss scale of f16 is carried from step to step in a slot of its own.
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
    /// The bits of the loss scale that the step's gradients carry; 0 where there is none.
    pub loss_scale: u32,
    pub reserved: [u32; 2],
}

/// Words of the slot of the loss scale.
pub const LOSS_SCALE_WORDS: usize = 4;

/// The loss scale of f16 and what moves it: carried from step to step on the device.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct LossScale {
    /// A power of two from 1 to 2^24.
    pub scale: f32,
    /// Steps with finite loss and norm since the scale last moved.
    pub good_steps: u32,
    /// Steps that were dropped because loss or norm was not finite.
    pub skipped: u32,
    pub reserved: u32,
}

impl LossScale {
    /// The state before the first step.
    pub const INITIAL: LossScale = LossScale {
        scale: 65536.0,
        good_steps: 0,
        skipped: 0,
        reserved: 0,
    };
    /// The greatest scale.
    pub const GREATEST: f32 = 16_777_216.0;

    /// The state after a step: `finite` says whether its loss and norm were.
    pub fn after(self, finite: Finite, growth_interval: u32) -> LossScale {
        match finite {
            Finite::No => LossScale {
                scale: (self.scale * 0.5).max(1.0),
                good_steps: 0,
                skipped: self.skipped.saturating_add(1),
                ..self
            },
            Finite::Yes if self.good_steps + 1 >= growth_interval => LossScale {
                scale: (self.scale * 2.0).min(Self::GREATEST),
                good_steps: 0,
                ..self
            },
            Finite::Yes => LossScale {
                good_steps: self.good_steps + 1,
                ..self
            },
        }
    }
}

/// Whether the loss and the gradient norm of a step were finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finite {
    Yes,
    No,
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
        assert_eq!(size_of::<LossScale>(), LOSS_SCALE_WORDS * 4);
    }

    #[test]
    fn the_loss_scale_halves_on_overflow_and_doubles_after_good_steps() {
        let first = LossScale::INITIAL.after(Finite::Yes, 3);
        assert_eq!((first.scale, first.good_steps), (65536.0, 1));
        let overflow = first.after(Finite::No, 3);
        assert_eq!(
            (overflow.scale, overflow.good_steps, overflow.skipped),
            (32768.0, 0, 1)
        );
        let mut state = overflow;
        for _ in 0..3 {
            state = state.after(Finite::Yes, 3);
        }
        assert_eq!(
            (state.scale, state.good_steps, state.skipped),
            (65536.0, 0, 1)
        );
        let ends = [(Finite::No, 1.0), (Finite::Yes, LossScale::GREATEST)];
        for (finite, end) in ends {
            for _ in 0..64 {
                state = state.after(finite, 1);
            }
            assert_eq!(state.scale, end);
        }
    }

    #[test]
    fn every_nan_is_stored_as_one() {
        assert_eq!(canonical_bits(f32::from_bits(0xffc0_1234)), CANONICAL_NAN);
        assert_eq!(canonical_bits(-0.0), 0x8000_0000);
    }
}
