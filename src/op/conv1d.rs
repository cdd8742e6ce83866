//! The causal depthwise convolution of Mamba with its bias and SiLU. Forward assigns; backward assigns the
//! weight gradients and writes the left half of the rows of its input's gradient.
//!
//! Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023, section 3.4.

use serde::{Deserialize, Serialize};

use super::{Access, OpCall, OpRule, Operand, Signature, Store};
use crate::error::PlanError;
use crate::grad::GradBuilder;
use crate::num::tree::{ROW_PIECE, TokenSum};
use crate::shape::{DType, Math};

/// The sizes of a convolution over sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConvShape {
    pub batch: usize,
    pub seq_len: usize,
    pub d_inner: usize,
    /// Positions that an output reads: its own and the `d_conv - 1` before it.
    pub d_conv: usize,
}

impl ConvShape {
    /// Tokens of the batch.
    pub fn rows(&self) -> usize {
        self.batch * self.seq_len
    }

    /// The inputs before a sequence's first position, oldest first.
    pub fn state(&self) -> [usize; 3] {
        [self.batch, self.d_inner, self.d_conv - 1]
    }

    /// What both directions read: the rows of `x` and `z`, the weight, the bias and, where sequences go
    /// on, the inputs before them with the flags of those that do.
    fn reads(&self, math: Math, carried: bool) -> Vec<Operand> {
        let mut reads = vec![
            Operand::read("xz", [self.rows(), 2 * self.d_inner], math.storage()),
            Operand::read("weight", [self.d_inner, self.d_conv], DType::F32),
            Operand::read("bias", [self.d_inner], DType::F32),
        ];
        if carried {
            reads.push(Operand::read("state", self.state(), DType::F32));
            reads.push(Operand::read("keep", [self.batch], DType::U32));
        }
        reads
    }
}

/// With `x` the left half of the rows of `xz` and `K = d_conv`: `v[t, c] = Σ_j weight[c, j] · x[t - K + 1 + j, c]`,
/// one fma chain over ascending `j`, then `+ bias[c]` once; `u = v · sigmoid(v)`.
///
/// Before its first position a sequence has `+0.0`, or the last `K - 1` inputs of the window before where
/// it is `carried` and its flag in `keep` is not 0. `state_next` takes this window's last `K - 1` inputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Conv1d {
    pub shape: ConvShape,
    pub carried: bool,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for Conv1d {
    fn stem(&self) -> &'static str {
        "conv1d"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let assign = Store::Assign.access();
        let u = [self.shape.rows(), self.shape.d_inner];
        let mut writes = vec![Operand::store("u", u, self.math.storage(), assign)];
        if self.carried {
            let state = self.shape.state();
            writes.push(Operand::store("state_next", state, DType::F32, assign));
        }
        Signature {
            reads: self.shape.reads(self.math, self.carried),
            writes,
        }
    }

    fn flops(&self) -> u64 {
        2 * (self.shape.rows() * self.shape.d_inner * self.shape.d_conv) as u64
    }

    fn backward(&self, call: &OpCall, grads: &mut GradBuilder) -> Result<(), PlanError> {
        let (xz, weight, bias) = (call.reads[0], call.reads[1], call.reads[2]);
        let mut reads = grads.incoming_parts(call.writes[0], self.stem())?;
        let parts = reads.len();
        reads.extend(&call.reads);
        let (dxz, _) = grads.activation_target(xz);
        let mut writes = vec![dxz];
        let trainable = grads.is_trainable(weight);
        if trainable {
            writes.push(grads.assigned_parameter_target(weight, self.stem())?);
            writes.push(grads.assigned_parameter_target(bias, self.stem())?);
        }
        let op = Conv1dGrad {
            shape: self.shape,
            sum: grads.token_sum(self.shape.rows(), Some(ROW_PIECE)),
            parts,
            weight_grad: trainable,
            carried: self.carried,
            math: self.math,
        };
        grads.emit(op, reads, writes);
        Ok(())
    }
}

/// With `du` the sum of its `parts` in their order, `v` as in forward and `s = sigmoid(v)`:
/// `dv = du · (s · fma(v, 1 - s, 1))`. `dx[t, c] = Σ_j weight[c, j] · dv[t + K - 1 - j, c]`, one fma chain over
/// ascending `j`, positions beyond the sequence's end being `+0.0`; it goes to the left half of the rows of
/// `dxz`, whose right half keeps its bits. `dweight[c, j]` is a sum over tokens of
/// `fma(dv[t, c], x[t - K + 1 + j, c], acc)`, `dbias[c]` one of `acc + dv[t, c]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Conv1dGrad {
    pub shape: ConvShape,
    pub sum: TokenSum,
    /// Gradients of `u` that are added: one for each of its readers.
    pub parts: usize,
    pub weight_grad: bool,
    pub carried: bool,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

/// The names of the parts of `du`.
const PARTS: [&str; 2] = ["du", "du_more"];

impl OpRule for Conv1dGrad {
    fn stem(&self) -> &'static str {
        "conv1d_grad"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let (shape, storage) = (&self.shape, self.math.storage());
        let (u, xz) = (
            [shape.rows(), shape.d_inner],
            [shape.rows(), 2 * shape.d_inner],
        );
        let parts = PARTS.iter().take(self.parts);
        let mut reads: Vec<Operand> = parts.map(|name| Operand::read(name, u, storage)).collect();
        reads.extend(shape.reads(self.math, self.carried));
        let mut writes = vec![Operand::store("dxz", xz, storage, Access::Update)];
        if self.weight_grad {
            let assign = Store::Assign.access();
            let weight = [shape.d_inner, shape.d_conv];
            writes.push(Operand::store("dweight", weight, DType::F32, assign));
            writes.push(Operand::store("dbias", [shape.d_inner], DType::F32, assign));
        }
        Signature { reads, writes }
    }

    fn flops(&self) -> u64 {
        6 * (self.shape.rows() * self.shape.d_inner * self.shape.d_conv) as u64
    }
}
