//! The global gradient norm and the decision whether the step is applied. Both assign.

use serde::{Deserialize, Serialize};

use super::step_values::{LOSS_SCALE_WORDS, REPORT_WORDS, SCALAR_WORDS};
use super::{Access, OpRule, Operand, Signature, Store};
use crate::shape::{DType, Math};

/// Elements of the gradient arena whose squares make one partial.
pub const SQUARES_BLOCK: usize = 16384;

/// `partials[b]` = Σ of squares of block `b` in f64: 256 lanes (lane l takes l, l+256, …, one fma
/// chain each), folded by halving.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GradSquares {
    pub elements: usize,
}

impl GradSquares {
    /// How many partials the gradient arena gives.
    pub fn partials(&self) -> usize {
        self.elements.div_ceil(SQUARES_BLOCK)
    }
}

impl OpRule for GradSquares {
    fn stem(&self) -> &'static str {
        "grad_squares"
    }

    fn signature(&self) -> Signature {
        let partials = [self.partials()];
        let assign = Store::Assign.access();
        Signature {
            reads: vec![Operand::read("grad", [self.elements], DType::F32)],
            writes: vec![Operand::store("partials", partials, DType::F64, assign)],
        }
    }
}

/// Folds the partials by the balanced tree, takes the norm, and writes the report: loss, norm before
/// clipping, the clip coefficient `min(1, max_norm / (norm + 1e-6))` (computed in f64, rounded once;
/// PyTorch's `clip_grad_norm_`), and whether the step is applied.
///
/// Gradients that carry a loss scale are not divided by it: the root of their squares is, in f64, where
/// a power of two is exact. The report names the scale the step had.
///
/// A step with a non-finite loss or norm, or with a norm above the spike limit, is not applied.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Clip {
    pub partials: usize,
    /// How the loss scale moves; `None` where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scaling: Option<LossScaling>,
}

/// How the loss scale of f16 moves. A step whose loss or norm is not finite halves the scale, down to 1,
/// and starts the count of good steps anew; any other counts as good, and after `growth_interval` good
/// ones the scale doubles, up to 2^24, and the count starts anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LossScaling {
    pub growth_interval: u32,
}

impl OpRule for Clip {
    fn stem(&self) -> &'static str {
        "clip"
    }

    fn math(&self) -> Math {
        match self.loss_scaling {
            Some(_) => Math::F16,
            None => Math::F32,
        }
    }

    fn signature(&self) -> Signature {
        let assign = Store::Assign.access();
        let mut writes = vec![Operand::store("report", [REPORT_WORDS], DType::U32, assign)];
        if self.loss_scaling.is_some() {
            let words = [LOSS_SCALE_WORDS];
            writes.push(Operand::store(
                "loss_scale",
                words,
                DType::U32,
                Access::Update,
            ));
        }
        Signature {
            reads: vec![
                Operand::read("partials", [self.partials], DType::F64),
                Operand::read("loss", [1], DType::F32),
                Operand::read("scalars", [SCALAR_WORDS], DType::F32),
            ],
            writes,
        }
    }
}
