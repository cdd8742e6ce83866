//! RMS norm, alone or fused with the residual addition before it. Forward assigns; the input
//! gradient assigns or accumulates, as its `store` says; the weight gradient assigns.
//!
//! Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

use serde::{Deserialize, Serialize};

use super::{OpCall, OpRule, Operand, Signature, Store};
use crate::error::PlanError;
use crate::grad::GradBuilder;
use crate::num::tree::{ROW_PIECE, TokenSum};
use crate::shape::{DType, Math};

/// `r = x + delta` (with `residual`), `rstd = 1 / sqrt(Σ r² / d + eps)`, `h = (r · rstd) · weight`.
///
/// The sum of squares is the 256-lane reduction. Without `residual` there is no `delta` and no `r`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNorm {
    pub rows: usize,
    pub d_model: usize,
    pub eps: f32,
    pub residual: bool,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for RmsNorm {
    fn stem(&self) -> &'static str {
        "rms_norm"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let matrix = [self.rows, self.d_model];
        let assign = Store::Assign.access();
        let mut reads = vec![Operand::read("x", matrix, DType::F32)];
        let mut writes = Vec::new();
        if self.residual {
            reads.push(Operand::read("delta", matrix, self.math.storage()));
            writes.push(Operand::store("r", matrix, DType::F32, assign));
        }
        reads.push(Operand::read("weight", [self.d_model], DType::F32));
        writes.push(Operand::store("h", matrix, self.math.storage(), assign));
        writes.push(Operand::store("rstd", [self.rows], DType::F32, assign));
        Signature { reads, writes }
    }

    /// The norm of the kept sum is the norm of the sum.
    fn again_from_output(&self, call: &OpCall) -> Option<OpCall> {
        let ([_, _, weight], [r, h, rstd]) = (&call.reads[..], &call.writes[..]) else {
            return None;
        };
        let op = RmsNorm {
            residual: false,
            ..self.clone()
        };
        Some(OpCall {
            op: op.into(),
            reads: vec![*r, *weight],
            writes: vec![*h, *rstd],
        })
    }

    fn backward(&self, call: &OpCall, grads: &mut GradBuilder) -> Result<(), PlanError> {
        let (input, weight, h, rstd) = if self.residual {
            (
                call.writes[0],
                call.reads[2],
                call.writes[1],
                call.writes[2],
            )
        } else {
            (call.reads[0], call.reads[1], call.writes[0], call.writes[1])
        };
        let dh = grads.incoming(h, self.stem())?;
        let (dr, store) = grads.activation_target(input);
        let mut writes = vec![dr];
        // The addend of a narrower type has a gradient of its own: the residual's, rounded once.
        let delta_grad = self.residual && self.math.storage() != DType::F32;
        if delta_grad {
            writes.push(grads.assigned_activation_target(call.reads[1], self.stem())?);
        }
        let trainable = grads.is_trainable(weight);
        if trainable {
            writes.push(grads.assigned_parameter_target(weight, self.stem())?);
        }
        let op = RmsNormGrad {
            d_model: self.d_model,
            sum: grads.token_sum(self.rows, Some(ROW_PIECE)),
            store,
            weight_grad: trainable,
            delta_grad,
            math: self.math,
        };
        grads.emit(op, vec![dh, input, weight, rstd], writes);
        if self.residual {
            // Both addends of the residual sum have the sum's gradient: one buffer serves all.
            grads.share(call.reads[0], dr, self.stem())?;
            if !delta_grad {
                grads.share(call.reads[1], dr, self.stem())?;
            }
        }
        Ok(())
    }
}

/// With `x̂ = r · rstd`, `g = dh · weight` and `c = (Σ g · x̂) / d` by the 256-lane reduction:
/// `dr (+)= rstd · fma(-x̂, c, g)`, and `dweight = Σ over tokens of dh · x̂` as a chain of fma within
/// a piece, folded by the tree.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNormGrad {
    pub d_model: usize,
    pub sum: TokenSum,
    pub store: Store,
    pub weight_grad: bool,
    /// Whether a copy of `dr` in the storage of `math` is written: the gradient of the `delta` that
    /// the norm has added, where activations are stored narrower than the residual stream.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub delta_grad: bool,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for RmsNormGrad {
    fn stem(&self) -> &'static str {
        "rms_norm_grad"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let matrix = [self.sum.tokens, self.d_model];
        let mut writes = vec![Operand::store(
            "dr",
            matrix,
            DType::F32,
            self.store.access(),
        )];
        let assign = Store::Assign.access();
        if self.delta_grad {
            let storage = self.math.storage();
            writes.push(Operand::store("ddelta", matrix, storage, assign));
        }
        if self.weight_grad {
            writes.push(Operand::store(
                "dweight",
                [self.d_model],
                DType::F32,
                assign,
            ));
        }
        Signature {
            reads: vec![
                Operand::read("dh", matrix, self.math.storage()),
                Operand::read("r", matrix, DType::F32),
                Operand::read("weight", [self.d_model], DType::F32),
                Operand::read("rstd", [self.sum.tokens], DType::F32),
            ],
            writes,
        }
    }
}
