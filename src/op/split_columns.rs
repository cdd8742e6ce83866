//! The columns of a matrix as two matrices, since products take whole rows. Both directions assign.

use serde::{Deserialize, Serialize};

use super::{OpCall, OpRule, Operand, Signature, Store};
use crate::error::PlanError;
use crate::grad::GradBuilder;
use crate::shape::Math;

/// `left` is the first `n_left` columns of `x`, `right` the `n_right` others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SplitColumns {
    pub rows: usize,
    pub n_left: usize,
    pub n_right: usize,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for SplitColumns {
    fn stem(&self) -> &'static str {
        "split_columns"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let (storage, assign) = (self.math.storage(), Store::Assign.access());
        let columns = self.n_left + self.n_right;
        let store = |name, n| Operand::store(name, [self.rows, n], storage, assign);
        Signature {
            reads: vec![Operand::read("x", [self.rows, columns], storage)],
            writes: vec![store("left", self.n_left), store("right", self.n_right)],
        }
    }

    fn backward(&self, call: &OpCall, grads: &mut GradBuilder) -> Result<(), PlanError> {
        let dleft = grads.incoming(call.writes[0], self.stem())?;
        let dright = grads.incoming(call.writes[1], self.stem())?;
        let dx = grads.assigned_activation_target(call.reads[0], self.stem())?;
        let op = SplitColumnsGrad {
            rows: self.rows,
            n_left: self.n_left,
            n_right: self.n_right,
            math: self.math,
        };
        grads.emit(op, vec![dleft, dright], vec![dx]);
        Ok(())
    }
}

/// `dx` has the columns of `dleft`, then those of `dright`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SplitColumnsGrad {
    pub rows: usize,
    pub n_left: usize,
    pub n_right: usize,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for SplitColumnsGrad {
    fn stem(&self) -> &'static str {
        "split_columns_grad"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let (storage, assign) = (self.math.storage(), Store::Assign.access());
        let columns = self.n_left + self.n_right;
        Signature {
            reads: vec![
                Operand::read("dleft", [self.rows, self.n_left], storage),
                Operand::read("dright", [self.rows, self.n_right], storage),
            ],
            writes: vec![Operand::store("dx", [self.rows, columns], storage, assign)],
        }
    }
}
