//! SwiGLU, fused over the concatenated gate and up projections. Forward assigns; backward overwrites
//! the projections with their gradient in place, and where the output is restored also the output's gradient with the
//! output.
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

    fn is_restorable(&self) -> bool {
        true
    }

    fn backward(&self, call: &OpCall, grads: &mut GradBuilder) -> Result<(), PlanError> {
        let (a, gate_up) = (call.writes[0], call.reads[0]);
        let da = grads.incoming(a, self.stem())?;
        let waiting = grads.take_waiting(a);
        let output = match waiting.is_empty() {
            true => Output::Left,
            false => Output::Restored,
        };
        let op = SwiGluGrad {
            rows: self.rows,
            d_ff: self.d_ff,
            output,
            math: self.math,
        };
        let (reads, writes) = match output {
            Output::Left => (vec![da], vec![gate_up]),
            Output::Restored => (vec![], vec![da, gate_up]),
        };
        grads.emit(op, reads, writes);
        grads.emit_waiting(waiting, da);
        grads.share(gate_up, gate_up, self.stem())
    }
}

/// What backward does about the output of forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Output {
    /// Nothing: what needs it finds it where forward has written it.
    #[default]
    Left,
    /// It is written again over its gradient, so that forward's needs no memory in between.
    Restored,
}

impl Output {
    fn is_left(&self) -> bool {
        *self == Output::Left
    }
}

/// With `s = sigmoid(g)`: `du = da · (g · s)`, `dg = (da · u) · (s · fma(g, 1 - s, 1))`, written over
/// `g` and `u`; and `a = (g · s) · u`, forward's bits, over `da` where the output is restored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SwiGluGrad {
    pub rows: usize,
    pub d_ff: usize,
    #[serde(default, skip_serializing_if = "Output::is_left")]
    pub output: Output,
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
        let (da, gate_up) = ([self.rows, self.d_ff], [self.rows, 2 * self.d_ff]);
        let storage = self.math.storage();
        let update = |name, shape| Operand::store(name, shape, storage, Access::Update);
        let gate_up = update("gate_up", gate_up);
        let (reads, writes) = match self.output {
            Output::Left => (vec![Operand::read("da", da, storage)], vec![gate_up]),
            Output::Restored => (vec![], vec![update("da", da), gate_up]),
        };
        Signature { reads, writes }
    }
}
