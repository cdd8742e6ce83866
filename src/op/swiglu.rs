//! SwiGLU, fused over the concatenated gate and up projections. Forward assigns; backward overwrites
//! the projections with their gradient in place.
//!
//! Source: Shazeer, "GLU Variants Improve Transformer", 2020.

use serde::{Deserialize, Serialize};

use super::{Access, OpCall, OpRule, Operand, Signature, Store};
use crate::error::PlanError;
use crate::grad::GradBuilder;
use crate::shape::Math;

/// `a = (g · sigmoid(g)) · u`, where a row of `gate_up` holds `g` then `u`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SwiGlu {
    pub rows: usize,
    pub d_ff: usize,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for SwiGlu {
    fn stem(&self) -> &'static str {
        "swiglu"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let assign = Store::Assign.access();
        Signature {
            reads: vec![Operand::read(
                "gate_up",
                [self.rows, 2 * self.d_ff],
                self.math.storage(),
            )],
            writes: vec![Operand::store(
                "a",
                [self.rows, self.d_ff],
                self.math.storage(),
                assign,
            )],
        }
    }

    fn backward(&self, call: &OpCall, grads: &mut GradBuilder) -> Result<(), PlanError> {
        let da = grads.incoming(call.writes[0], self.stem())?;
        let gate_up = call.reads[0];
        let op = SwiGluGrad {
            rows: self.rows,
            d_ff: self.d_ff,
            math: self.math,
        };
        grads.emit(op, vec![da], vec![gate_up]);
        grads.share(gate_up, gate_up, self.stem())
    }
}

/// With `s = sigmoid(g)`: `du = da · (g · s)`, `dg = (da · u) · (s · fma(g, 1 - s, 1))`, written over
/// `g` and `u`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SwiGluGrad {
    pub rows: usize,
    pub d_ff: usize,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for SwiGluGrad {
    fn stem(&self) -> &'static str {
        "swiglu_grad"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let gate_up = [self.rows, 2 * self.d_ff];
        Signature {
            reads: vec![Operand::read(
                "da",
                [self.rows, self.d_ff],
                self.math.storage(),
            )],
            writes: vec![Operand::store(
                "gate_up",
                gate_up,
                self.math.storage(),
                Access::Update,
            )],
        }
    }
}
