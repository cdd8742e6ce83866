//! Parity: a training run that another framework recorded, held against the same run here.
//!
//! The record is a model folder with `reference.json` (hyperparameters, losses and gradient norms)
//! and `reference.safetensors` (batches, the logits and gradients of step 0, the parameters after the
//! last step). Both sides round differently, so the comparison is of relative errors with a tolerance
//! for each kind; it shows that the model is the same function, not that the bits are.

mod measure;
mod record;

pub use measure::run;
pub use record::Reference;

use crate::shape::Math;

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The logits of step 0, before any update.
    Logits,
    /// The gradients of step 0, before clipping.
    Gradient,
    /// The loss of each step.
    Loss,
    /// The global gradient norm of each step, before clipping.
    GradNorm,
    /// The parameters after the last step; the error is relative to how far they moved.
    Change,
}

impl Kind {
    /// Every kind, in the order of a step.
    pub const ALL: [Kind; 5] = [
        Kind::Logits,
        Kind::Gradient,
        Kind::Loss,
        Kind::GradNorm,
        Kind::Change,
    ];

    /// The kind's name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Logits => "logits",
            Kind::Gradient => "gradient",
            Kind::Loss => "loss",
            Kind::GradNorm => "grad norm",
            Kind::Change => "change",
        }
    }
}

/// The largest relative error accepted, by kind. The defaults leave an f32 run room of about five
/// times what another f32 implementation shows against a record made in f64.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerances {
    pub logits: f64,
    pub gradients: f64,
    pub losses: f64,
    pub norms: f64,
    pub change: f64,
}

impl Default for Tolerances {
    fn default() -> Self {
        Tolerances {
            logits: 1e-5,
            gradients: 1e-5,
            losses: 1e-6,
            norms: 5e-6,
            change: 5e-3,
        }
    }
}

impl Tolerances {
    /// The defaults for runs computed as `math` says. Beyond f32 they leave room for operands that
    /// are rounded to 2^-11 (tf32, f16) or 2^-8 (bf16) of themselves at every product.
    pub fn of_math(math: Math) -> Self {
        let rounding = match math {
            Math::F32 => return Tolerances::default(),
            Math::Tf32 | Math::F16 => 1.0 / 2048.0,
            Math::Bf16 => 1.0 / 256.0,
        };
        Tolerances {
            logits: 8.0 * rounding,
            gradients: 16.0 * rounding,
            losses: 2.0 * rounding,
            norms: 8.0 * rounding,
            change: 64.0 * rounding,
        }
    }

    /// The tolerance of a kind.
    pub const fn of(&self, kind: Kind) -> f64 {
        match kind {
            Kind::Logits => self.logits,
            Kind::Gradient => self.gradients,
            Kind::Loss => self.losses,
            Kind::GradNorm => self.norms,
            Kind::Change => self.change,
        }
    }
}

/// One comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    pub kind: Kind,
    /// The tensor, or the step.
    pub name: String,
    /// `‖ours - theirs‖ / ‖theirs‖`; for [`Kind::Change`] the divisor is the norm of their change.
    pub error: f64,
    pub tolerance: f64,
}

impl Row {
    /// Whether the error is within the tolerance; one that is not a number is not.
    pub fn holds(&self) -> bool {
        self.error <= self.tolerance
    }
}

/// All comparisons with one record; never empty.
#[derive(Clone, Debug, PartialEq)]
pub struct ParityReport {
    pub rows: Vec<Row>,
}

impl ParityReport {
    /// Whether every comparison holds.
    pub fn holds(&self) -> bool {
        self.rows.iter().all(Row::holds)
    }

    /// The comparisons of a kind.
    pub fn of(&self, kind: Kind) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(move |row| row.kind == kind)
    }

    /// The comparison of a kind with the largest error; one that is not a number is the largest.
    pub fn worst(&self, kind: Kind) -> Option<&Row> {
        let size = |row: &&Row| match row.error.is_nan() {
            true => f64::INFINITY,
            false => row.error,
        };
        self.of(kind).max_by(|a, b| size(a).total_cmp(&size(b)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(kind: Kind, error: f64) -> Row {
        let name = format!("{error}");
        let tolerance = Tolerances::default().of(kind);
        Row {
            kind,
            name,
            error,
            tolerance,
        }
    }

    #[test]
    fn an_error_that_is_not_a_number_is_the_worst_and_does_not_hold() {
        let rows = [9e-6, f64::NAN, 1e-6].map(|e| row(Kind::Logits, e)).into();
        let report = ParityReport { rows };
        assert!(report.worst(Kind::Logits).unwrap().error.is_nan());
        assert!(!report.holds());
        assert!(report.worst(Kind::Loss).is_none());
    }

    #[test]
    fn a_coarser_rounding_is_given_more_room() {
        assert_eq!(Tolerances::of_math(Math::F32), Tolerances::default());
        for kind in Kind::ALL {
            let [f32, f16, bf16] =
                [Math::F32, Math::F16, Math::Bf16].map(|math| Tolerances::of_math(math).of(kind));
            assert!(f32 < f16 && f16 < bf16, "{}", kind.name());
        }
    }

    #[test]
    fn each_kind_has_its_own_tolerance() {
        for kind in Kind::ALL {
            let tolerance = Tolerances::default().of(kind);
            assert!(row(kind, tolerance).holds());
            assert!(!row(kind, tolerance * 1.001).holds());
        }
    }
}
