//! Linear layers. Forward and the input gradient assign; the weight gradient assigns or accumulates,
//! as its `store` says.

use serde::{Deserialize, Serialize};

use super::bias::BiasGrad;
use super::{OpCall, OpRule, Operand, Signature, Slot, Store};
use crate::error::PlanError;
use crate::grad::GradBuilder;
use crate::num::tree::{ROW_PIECE, TokenSum};
use crate::shape::{DType, Math};

/// `y[t, o] = Σ_i x[t, i] · weight[o, i]`, one fma chain over ascending `i`, then `+ bias[o]` once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Matmul {
    pub rows: usize,
    pub n_in: usize,
    pub n_out: usize,
    pub bias: bool,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for Matmul {
    fn stem(&self) -> &'static str {
        "matmul"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let mut reads = vec![
            Operand::read("x", [self.rows, self.n_in], self.math.storage()),
            Operand::read("weight", [self.n_out, self.n_in], self.math.storage()),
        ];
        if self.bias {
            reads.push(Operand::read("bias", [self.n_out], DType::F32));
        }
        let y = [self.rows, self.n_out];
        Signature {
            reads,
            writes: vec![Operand::store(
                "y",
                y,
                self.math.storage(),
                Store::Assign.access(),
            )],
        }
    }

    fn flops(&self) -> u64 {
        product_flops(self.rows, self.n_in, self.n_out)
    }

    fn backward(&self, call: &OpCall, grads: &mut GradBuilder) -> Result<(), PlanError> {
        let (x, weight) = (call.reads[0], call.reads[1]);
        let dy = grads.incoming(call.writes[0], self.stem())?;
        if self.bias && grads.is_trainable(call.reads[2]) {
            let dbias = grads.assigned_parameter_target(call.reads[2], self.stem())?;
            let op = BiasGrad {
                n_out: self.n_out,
                sum: grads.token_sum(self.rows, Some(ROW_PIECE)),
                math: self.math,
            };
            grads.emit(op, vec![dy], vec![dbias]);
        }
        self.emit_weight_gradient(grads, (dy, x), weight);
        if grads.needs_gradient(x) {
            let dx = grads.assigned_activation_target(x, self.stem())?;
            let op = MatmulGradInput {
                rows: self.rows,
                n_in: self.n_in,
                n_out: self.n_out,
                math: self.math,
            };
            grads.emit(op, vec![dy, weight], vec![dx]);
        }
        Ok(())
    }
}

impl Matmul {
    /// Emits the gradient of the weight, if it is trained, from the output's gradient and the input.
    pub fn emit_weight_gradient(
        &self,
        grads: &mut GradBuilder,
        (dy, x): (Slot, Slot),
        weight: Slot,
    ) {
        if !grads.is_trainable(weight) {
            return;
        }
        let (dweight, store) = grads.parameter_target(weight);
        let op = MatmulGradWeight {
            n_in: self.n_in,
            n_out: self.n_out,
            sum: grads.weight_sum(self.math, self.rows, self.n_in * self.n_out),
            store,
            math: self.math,
        };
        grads.emit_reading(op, (dy, x), dweight);
    }
}

/// `dx[t, i] = Σ_o dy[t, o] · weight[o, i]`, one fma chain over ascending `o`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MatmulGradInput {
    pub rows: usize,
    pub n_in: usize,
    pub n_out: usize,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for MatmulGradInput {
    fn stem(&self) -> &'static str {
        "matmul_grad_input"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let dx = [self.rows, self.n_in];
        Signature {
            reads: vec![
                Operand::read("dy", [self.rows, self.n_out], self.math.storage()),
                Operand::read("weight", [self.n_out, self.n_in], self.math.storage()),
            ],
            writes: vec![Operand::store(
                "dx",
                dx,
                self.math.storage(),
                Store::Assign.access(),
            )],
        }
    }

    fn flops(&self) -> u64 {
        product_flops(self.rows, self.n_in, self.n_out)
    }
}

/// `dweight[o, i] (+)= Σ_t dy[t, o] · x[t, i]`: an fma chain over ascending tokens within a piece,
/// pieces and grains folded by the balanced tree.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MatmulGradWeight {
    pub n_in: usize,
    pub n_out: usize,
    pub sum: TokenSum,
    pub store: Store,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for MatmulGradWeight {
    fn stem(&self) -> &'static str {
        "matmul_grad_weight"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let rows = self.sum.tokens;
        let dweight = [self.n_out, self.n_in];
        Signature {
            reads: vec![
                Operand::read("dy", [rows, self.n_out], self.math.storage()),
                Operand::read("x", [rows, self.n_in], self.math.storage()),
            ],
            writes: vec![Operand::store(
                "dweight",
                dweight,
                DType::F32,
                self.store.access(),
            )],
        }
    }

    fn flops(&self) -> u64 {
        product_flops(self.sum.tokens, self.n_in, self.n_out)
    }
}

fn product_flops(rows: usize, n_in: usize, n_out: usize) -> u64 {
    2 * rows as u64 * n_in as u64 * n_out as u64
}
