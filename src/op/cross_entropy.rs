//! Weighted, masked cross-entropy, forward and backward in place on the logits, and the loss. Every
//! op here assigns.

use serde::{Deserialize, Serialize};

use super::step_values::{LOSS_SCALE_WORDS, SCALAR_WORDS};
use super::{Access, OpCall, OpRule, Operand, Signature, Store};
use crate::error::PlanError;
use crate::grad::GradBuilder;
use crate::num::tree::TokenSum;
use crate::shape::{DType, Math};

/// The target that takes no part in the loss.
pub const IGNORE: i32 = -100;

/// What is left in the logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogitsAfter {
    /// The logits are overwritten by the gradient of the loss.
    Gradient,
    /// The logits are kept; evaluation.
    Kept,
}

/// With `max` the row's maximum and `lse = max + log(Σ exp(x - max))` by the 256-lane reduction:
/// `row_loss = (lse - x[target]) · weight`, `row_hit` = 1 where `x[target] = max` (also where others equal it), and the logits
/// become `(exp(x - lse) - [index = target]) · (weight · inv_normaliser)`. An ignored row gives
/// `+0.0` everywhere.
///
/// Narrow logits have one exponential each, by [`crate::num::logits`]: its weight, rounded, times a factor is the gradient,
/// which is rounded once more. In f16 the factor holds the loss scale.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CrossEntropy {
    pub rows: usize,
    pub vocab_size: usize,
    pub after: LogitsAfter,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for CrossEntropy {
    fn stem(&self) -> &'static str {
        "cross_entropy"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let logits = [self.rows, self.vocab_size];
        let storage = self.math.storage();
        let assign = Store::Assign.access();
        let mut reads = vec![
            Operand::read("targets", [self.rows], DType::I32),
            Operand::read("weights", [self.rows], DType::F32),
            Operand::read("scalars", [SCALAR_WORDS], DType::F32),
        ];
        let mut writes = vec![
            Operand::store("row_loss", [self.rows], DType::F32, assign),
            Operand::store("row_hit", [self.rows], DType::U32, assign),
        ];
        match self.after {
            LogitsAfter::Gradient => {
                writes.push(Operand::store("logits", logits, storage, Access::Update));
                if self.math.scales_loss() {
                    let words = [LOSS_SCALE_WORDS];
                    reads.push(Operand::read("loss_scale", words, DType::U32));
                }
            }
            LogitsAfter::Kept => reads.push(Operand::read("logits", logits, storage)),
        }
        Signature { reads, writes }
    }

    fn backward(&self, call: &OpCall, grads: &mut GradBuilder) -> Result<(), PlanError> {
        match self.after {
            LogitsAfter::Gradient => grads.share(call.writes[2], call.writes[2], self.stem()),
            LogitsAfter::Kept => Err(PlanError::NoBackward {
                op: self.stem(),
                tensor: grads.first_write_name(call),
            }),
        }
    }
}

/// `loss = (Σ row_loss) · inv_normaliser`: a chain of additions over ascending tokens within a piece,
/// pieces and grains folded by the balanced tree.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossSum {
    pub sum: TokenSum,
}

impl OpRule for LossSum {
    fn stem(&self) -> &'static str {
        "loss_sum"
    }

    fn signature(&self) -> Signature {
        Signature {
            reads: vec![
                Operand::read("row_loss", [self.sum.tokens], DType::F32),
                Operand::read("scalars", [SCALAR_WORDS], DType::F32),
            ],
            writes: vec![Operand::store(
                "loss",
                [1],
                DType::F32,
                Store::Assign.access(),
            )],
        }
    }
}
