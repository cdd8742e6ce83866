//! The global gradient norm and the decision whether the step is applied. Both assign.

use serde::{Deserialize, Serialize};

use super::step_values::{REPORT_WORDS, SCALAR_WORDS};
use super::{OpRule, Operand, Signature, Store};
use crate::shape::DType;

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
/// A step with a non-finite loss or norm, or with a norm above the spike limit, is not applied.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Clip {
    pub partials: usize,
}

impl OpRule for Clip {
    fn stem(&self) -> &'static str {
        "clip"
    }

    fn signature(&self) -> Signature {
        let assign = Store::Assign.access();
        Signature {
            reads: vec![
                Operand::read("partials", [self.partials], DType::F64),
                Operand::read("loss", [1], DType::F32),
                Operand::read("scalars", [SCALAR_WORDS], DType::F32),
            ],
            writes: vec![Operand::store("report", [REPORT_WORDS], DType::U32, assign)],
        }
    }
}
