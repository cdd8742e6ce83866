//! Rotary position embedding on the query and key heads, alone or fused with per-head RMS norms.
//!
//! The pairing is that of transformers: element `i` with `i + head_dim / 2`. A row of `qkv` holds the
//! query heads, then the key heads, then the value heads; values pass unchanged. `rope` and both
//! backward ops update in place, `qk_norm_rope` assigns; the norm-weight gradients assign.
//!
//! Source: Su et al., "RoFormer", 2021.

use serde::{Deserialize, Serialize};

use super::{Access, OpCall, OpRule, Operand, Signature, Store};
use crate::error::PlanError;
use crate::grad::GradBuilder;
use crate::num::tree::{ROW_PIECE, TokenSum};
use crate::shape::{DType, Math};

/// How the columns of a `qkv` row are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Heads {
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
}

impl Heads {
    /// Columns of a `qkv` row.
    pub fn columns(&self) -> usize {
        (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
    }

    /// Columns of an attention output row.
    pub fn query_columns(&self) -> usize {
        self.n_heads * self.head_dim
    }

    /// Heads that are rotated: queries and keys.
    pub fn rotated(&self) -> usize {
        self.n_heads + self.n_kv_heads
    }

    /// Query heads that share one key head.
    pub fn group(&self) -> usize {
        self.n_heads / self.n_kv_heads
    }
}

/// For each pair `(a, b)` of a rotated head with the position's `(cos, sin)`:
/// `a' = fma(a, cos, -(b · sin))`, `b' = fma(b, cos, a · sin)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    pub rows: usize,
    pub seq_len: usize,
    pub heads: Heads,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

fn table(seq_len: usize, heads: &Heads) -> Operand {
    Operand::read("table", [seq_len, heads.head_dim / 2, 2], DType::F32)
}

/// Bytes of a rotation in place, which touches query and key columns only.
fn rotation_bytes((rows, math): (usize, Math), seq_len: usize, heads: &Heads) -> u64 {
    let rotated = rows * heads.rotated() * heads.head_dim * math.storage().size();
    table(seq_len, heads).traffic() + 2 * rotated as u64
}

fn updated_qkv(name: &'static str, (rows, math): (usize, Math), heads: &Heads) -> Operand {
    Operand::store(
        name,
        [rows, heads.columns()],
        math.storage(),
        Access::Update,
    )
}

impl OpRule for Rope {
    fn stem(&self) -> &'static str {
        "rope"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        Signature {
            reads: vec![table(self.seq_len, &self.heads)],
            writes: vec![updated_qkv("qkv", (self.rows, self.math), &self.heads)],
        }
    }

    fn bytes(&self) -> u64 {
        rotation_bytes((self.rows, self.math), self.seq_len, &self.heads)
    }

    fn backward(&self, call: &OpCall, grads: &mut GradBuilder) -> Result<(), PlanError> {
        // In place forward, in place backward: the gradient of the slot stays the same buffer.
        let dqkv = grads.incoming(call.writes[0], self.stem())?;
        let op = RopeGrad {
            rows: self.rows,
            seq_len: self.seq_len,
            heads: self.heads,
            math: self.math,
        };
        grads.emit(op, vec![call.reads[0]], vec![dqkv]);
        Ok(())
    }
}

/// The inverse rotation: `da = fma(da', cos, db' · sin)`, `db = fma(db', cos, -(da' · sin))`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeGrad {
    pub rows: usize,
    pub seq_len: usize,
    pub heads: Heads,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for RopeGrad {
    fn stem(&self) -> &'static str {
        "rope_grad"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        Signature {
            reads: vec![table(self.seq_len, &self.heads)],
            writes: vec![updated_qkv("dqkv", (self.rows, self.math), &self.heads)],
        }
    }

    fn bytes(&self) -> u64 {
        rotation_bytes((self.rows, self.math), self.seq_len, &self.heads)
    }
}

/// The RMS norm of each query and key head (256-lane reduction over `head_dim`) with the weight of
/// its kind, then the rotation; values are copied.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QkNormRope {
    pub rows: usize,
    pub seq_len: usize,
    pub heads: Heads,
    pub eps: f32,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for QkNormRope {
    fn stem(&self) -> &'static str {
        "qk_norm_rope"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let matrix = [self.rows, self.heads.columns()];
        let rstd = [self.rows, self.heads.rotated()];
        let assign = Store::Assign.access();
        Signature {
            reads: vec![
                Operand::read("qkv", matrix, self.math.storage()),
                Operand::read("q_weight", [self.heads.head_dim], DType::F32),
                Operand::read("k_weight", [self.heads.head_dim], DType::F32),
                table(self.seq_len, &self.heads),
            ],
            writes: vec![
                Operand::store("rotated", matrix, self.math.storage(), assign),
                Operand::store("rstd", rstd, DType::F32, assign),
            ],
        }
    }

    fn backward(&self, call: &OpCall, grads: &mut GradBuilder) -> Result<(), PlanError> {
        let dqkv = grads.incoming(call.writes[0], self.stem())?;
        let mut writes = vec![dqkv];
        let trainable = grads.is_trainable(call.reads[1]);
        if trainable {
            for weight in [call.reads[1], call.reads[2]] {
                writes.push(grads.assigned_parameter_target(weight, self.stem())?);
            }
        }
        let op = QkNormRopeGrad {
            seq_len: self.seq_len,
            heads: self.heads,
            sum: grads.token_sum(self.rows, Some(ROW_PIECE)),
            weight_grad: trainable,
            math: self.math,
        };
        let reads = vec![
            call.reads[0],
            call.reads[1],
            call.reads[2],
            call.reads[3],
            call.writes[1],
        ];
        grads.emit(op, reads, writes);
        grads.share(call.reads[0], dqkv, self.stem())
    }
}

/// The inverse rotation, then the norm's backward in place on `dqkv` (the formula of
/// [`super::rms_norm::RmsNormGrad`] with `d = head_dim`); the weight gradients sum over tokens and,
/// within a token, over heads ascending, as one fma chain a piece.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QkNormRopeGrad {
    pub seq_len: usize,
    pub heads: Heads,
    pub sum: TokenSum,
    pub weight_grad: bool,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for QkNormRopeGrad {
    fn stem(&self) -> &'static str {
        "qk_norm_rope_grad"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let rows = self.sum.tokens;
        let weight = [self.heads.head_dim];
        let mut writes = vec![updated_qkv("dqkv", (rows, self.math), &self.heads)];
        if self.weight_grad {
            let assign = Store::Assign.access();
            writes.push(Operand::store("dq_weight", weight, DType::F32, assign));
            writes.push(Operand::store("dk_weight", weight, DType::F32, assign));
        }
        Signature {
            reads: vec![
                Operand::read("qkv", [rows, self.heads.columns()], self.math.storage()),
                Operand::read("q_weight", weight, DType::F32),
                Operand::read("k_weight", weight, DType::F32),
                table(self.seq_len, &self.heads),
                Operand::read("rstd", [rows, self.heads.rotated()], DType::F32),
            ],
            writes,
        }
    }
}
