//! How a step is carried out: at once, in passes over parts of its batch, or in halves around a loss of the
//! caller's. The form decides memory, time and what a caller can do between programs; it decides no bit.

use super::PlanConfig;
use crate::error::PlanError;

/// How a step is carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepForm {
    pub passes: Passes,
    pub recompute: Recompute,
}

/// Which activations backward computes anew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    /// None: all are kept.
    #[default]
    Nothing,
    /// Those of so many layers at a time, which keep only what goes into them.
    Layers(usize),
    /// Those that cost the least time for each byte they would take, until the arena takes at most so many bytes.
    Within { arena_bytes: usize },
}

impl From<Option<usize>> for Recompute {
    /// So many layers at a time, or nothing.
    fn from(layers: Option<usize>) -> Self {
        layers.map_or(Recompute::Nothing, Recompute::Layers)
    }
}

impl StepForm {
    /// Whether this is the form that defines a step's bits: one program over the whole batch, with all
    /// activations kept.
    pub fn is_defining(&self) -> bool {
        *self == StepForm::default()
    }
}

/// Over what a step's forward and backward go at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Passes {
    /// One program from the batch to the update.
    #[default]
    Whole,
    /// The batch in micro-batches of so many sequences, whose gradients are accumulated.
    Micro { sequences: usize },
    /// One program from the batch to the update, and beside it forward and backward as programs of their own,
    /// between which the caller computes a loss. Up to so many backward passes may be accumulated before an
    /// update; every doubling takes the memory of one more gradient.
    Halves { most_passes: u64 },
}

impl PlanConfig {
    /// The configuration in the form that defines the bits.
    pub fn defining(&self) -> PlanConfig {
        PlanConfig {
            form: StepForm::default(),
            ..self.clone()
        }
    }

    /// Sequences that forward and backward compute at once.
    ///
    /// The tree over grains must contain the tree of a pass, which holds for powers of two. So a micro-batch of
    /// another number of grains is computed in passes of the largest power of two of grains that divides it.
    pub fn pass_sequences(&self) -> usize {
        match self.form.passes {
            Passes::Micro { sequences } if sequences < self.batch => {
                let grains = (sequences / self.grain.max(1)).max(1);
                self.grain << grains.trailing_zeros()
            }
            _ => self.batch,
        }
    }

    /// Grains of one pass.
    pub fn pass_grains(&self) -> usize {
        self.pass_sequences() / self.grain.max(1)
    }

    /// Passes of one step, where the plan knows them.
    pub fn passes(&self) -> usize {
        self.batch / self.pass_sequences().max(1)
    }

    /// Whether a step is made of several passes.
    pub fn is_split(&self) -> bool {
        self.passes() > 1
    }

    /// Levels of partial sums that a window of accumulated passes needs: one for each binary digit of the number
    /// of passes before the last.
    pub(super) fn window_levels(&self) -> usize {
        let passes = match self.form.passes {
            Passes::Whole => 1,
            Passes::Micro { .. } => self.passes() as u64,
            Passes::Halves { most_passes } => most_passes.max(1),
        };
        (u64::BITS - (passes - 1).leading_zeros()) as usize
    }

    /// Checks that the batch can be carried out in this form.
    ///
    /// # Errors
    /// [`PlanError::Form`] names what does not fit.
    pub(super) fn check_form(&self) -> Result<(), PlanError> {
        let refused = |form, expected, found| {
            Err(PlanError::Form {
                form,
                expected,
                found,
            })
        };
        if self.form.recompute == Recompute::Layers(0) {
            let expected = "at least one layer at a time";
            return refused("recomputation", expected, "0".to_owned());
        }
        let whole = |n: usize, of: usize| of > 0 && n.is_multiple_of(of);
        match self.form.passes {
            Passes::Whole => Ok(()),
            Passes::Micro { sequences } => {
                match whole(self.batch, sequences) && whole(sequences, self.grain) {
                    true => Ok(()),
                    false => refused(
                        "a micro-batch",
                        "a divisor of the batch in whole grains",
                        format!(
                            "{sequences} sequences of a batch of {} with grains of {}",
                            self.batch, self.grain
                        ),
                    ),
                }
            }
            Passes::Halves { most_passes } => {
                let grains = self.batch / self.grain.max(1);
                let fits = whole(self.batch, self.grain) && grains.is_power_of_two();
                match most_passes <= 1 || fits {
                    true => Ok(()),
                    false => refused(
                        "passes that are accumulated",
                        "a power of two of whole grains each",
                        format!("{} sequences with grains of {}", self.batch, self.grain),
                    ),
                }
            }
        }
    }
}
