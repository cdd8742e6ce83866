//! AdamW over the whole parameter arena in one call. Updates in place, or leaves every bit when the
//! step was dropped.
//!
//! Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::step_values::{REPORT_WORDS, SCALAR_WORDS};
use super::{Access, OpRule, Operand, Signature};
use crate::shape::{DType, Math};

/// With `g = grad · clip_coefficient` and the step's `lr, c1, c2, decay` from the scalars:
/// `m = fma(beta1, m, (1 - beta1) · g)`, `v = fma(beta2, v, ((1 - beta2) · g) · g)`,
/// `u = (m · c1) / (sqrt(v · c2) + eps)`, `p = fma(-lr, u, p · decay)`.
///
/// The first `decayed` elements decay; the others have a decay factor of one and their `p` is not
/// multiplied. Where the storage of `math` is narrower than f32, the new `p` of [`AdamW::shadowed`], rounded once, is
/// written to the shadow that products read. With a loss scale `g = (grad · (1 / scale)) · clip_coefficient`;
/// the scale is the report's, that of this step. `1 - beta` is computed in f64 from the recipe's betas and rounded once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamW {
    pub elements: usize,
    pub decayed: usize,
    pub beta1: f32,
    pub one_minus_beta1: f32,
    pub beta2: f32,
    pub one_minus_beta2: f32,
    pub eps: f32,
    /// Elements before the first one that has a shadow, and after the last one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub before_shadow: usize,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub after_shadow: usize,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

impl AdamW {
    /// The elements that have a shadow where the storage of `math` is narrower than f32.
    pub fn shadowed(&self) -> Range<usize> {
        let end = self.elements.saturating_sub(self.after_shadow);
        self.before_shadow.min(end)..end
    }
}

impl OpRule for AdamW {
    fn stem(&self) -> &'static str {
        "adamw"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let n = [self.elements];
        let mut writes = vec![
            Operand::store("param", n, DType::F32, Access::Update),
            Operand::store("moment1", n, DType::F32, Access::Update),
            Operand::store("moment2", n, DType::F32, Access::Update),
        ];
        if self.math.storage() != DType::F32 {
            // A dropped step keeps it as it is, so it is an update.
            let (storage, shadowed) = (self.math.storage(), [self.shadowed().len()]);
            writes.push(Operand::store("shadow", shadowed, storage, Access::Update));
        }
        Signature {
            reads: vec![
                Operand::read("grad", n, DType::F32),
                Operand::read("scalars", [SCALAR_WORDS], DType::F32),
                Operand::read("report", [REPORT_WORDS], DType::U32),
            ],
            writes,
        }
    }
}
