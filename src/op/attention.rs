//! Causal softmax attention with grouped key and value heads, as an online softmax over key tiles.
//! Every op here assigns; the two gradient passes write disjoint columns of `dqkv`.
//!
//! The order of every sum is fixed: keys ascending for the output and for `dq`, queries ascending
//! (within a query head; query heads of a group ascending) for `dk` and `dv`. A masked position is
//! not part of any chain.
//!
//! Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao,
//! "FlashAttention-2", 2023.

use serde::{Deserialize, Serialize};

use super::rope::Heads;
use super::{Access, OpCall, OpRule, Operand, Signature, Store};
use crate::error::PlanError;
use crate::grad::GradBuilder;
use crate::shape::{DType, Math};

/// Keys of one tile: after each tile the running maximum and the accumulators are rescaled.
pub const KEY_TILE: usize = 64;

/// The factor on scores, `1 / sqrt(head_dim)`, computed in f64 and rounded once.
pub fn score_scale(head_dim: usize) -> f32 {
    (1.0 / (head_dim as f64).sqrt()) as f32
}

/// The sizes all attention ops share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AttentionShape {
    pub batch: usize,
    pub seq_len: usize,
    pub heads: Heads,
}

impl AttentionShape {
    /// Rows: tokens of the batch.
    pub fn rows(&self) -> usize {
        self.batch * self.seq_len
    }

    fn qkv(&self) -> [usize; 2] {
        [self.rows(), self.heads.columns()]
    }

    fn output(&self) -> [usize; 2] {
        [self.rows(), self.heads.query_columns()]
    }

    fn per_head(&self) -> [usize; 2] {
        [self.rows(), self.heads.n_heads]
    }

    /// Operations of `products` causal products of this size.
    fn flops(&self, products: u64) -> u64 {
        let pairs =
            (self.seq_len * (self.seq_len + 1) / 2 * self.batch * self.heads.n_heads) as u64;
        2 * products * pairs * self.heads.head_dim as u64
    }
}

/// For query `i` and each tile of keys `j ≤ i`: `s_j = (q_i · k_j) · scale` (fma chain over the head),
/// `m' = max(m, s_j…)`, `α = exp(m - m')`, `l = l · α`, `acc = acc · α`, then for ascending `j`
/// `p_j = exp(s_j - m')`, `l = l + p_j`, `acc = fma(p_j, v_j, acc)`. At the end
/// `o = acc · (1 / l)`, `lse = m + log(l)`. Starts from `m = -∞`, `l = acc = +0.0`. In the tensor-core domains weights
/// and `lse` are those of [`crate::num::softmax`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attention {
    pub shape: AttentionShape,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for Attention {
    fn stem(&self) -> &'static str {
        "attention"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let assign = Store::Assign.access();
        Signature {
            reads: vec![Operand::read("qkv", self.shape.qkv(), self.math.storage())],
            writes: vec![
                Operand::store("o", self.shape.output(), self.math.storage(), assign),
                Operand::store("lse", self.shape.per_head(), DType::F32, assign),
            ],
        }
    }

    fn flops(&self) -> u64 {
        self.shape.flops(2)
    }

    fn backward(&self, call: &OpCall, grads: &mut GradBuilder) -> Result<(), PlanError> {
        let (qkv, o, lse) = (call.reads[0], call.writes[0], call.writes[1]);
        let dout = grads.incoming(o, self.stem())?;
        let delta = grads.scratch("attention.delta", self.shape.per_head());
        let (shape, math) = (self.shape, self.math);
        grads.emit(AttentionDelta { shape, math }, vec![dout, o], vec![delta]);
        let dqkv = grads.assigned_activation_target(qkv, self.stem())?;
        let reads = vec![qkv, dout, lse, delta];
        grads.emit(
            AttentionGradQuery { shape, math },
            reads.clone(),
            vec![dqkv],
        );
        grads.emit(AttentionGradKeyValue { shape, math }, reads, vec![dqkv]);
        Ok(())
    }
}

/// `delta[t, h] = Σ_d dout[t, h, d] · o[t, h, d]` by the 256-lane reduction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionDelta {
    pub shape: AttentionShape,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for AttentionDelta {
    fn stem(&self) -> &'static str {
        "attention_delta"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let assign = Store::Assign.access();
        Signature {
            reads: vec![
                Operand::read("dout", self.shape.output(), self.math.storage()),
                Operand::read("o", self.shape.output(), self.math.storage()),
            ],
            writes: vec![Operand::store(
                "delta",
                self.shape.per_head(),
                DType::F32,
                assign,
            )],
        }
    }
}

/// Bytes of a gradient pass that writes `columns` of a row of `dqkv` and reads none of them.
fn grad_bytes((shape, math): (&AttentionShape, Math), columns: usize) -> u64 {
    let reads = grad_signature(shape, math, Access::Partial).reads;
    let read: u64 = reads.iter().map(Operand::traffic).sum();
    read + (shape.rows() * columns * math.storage().size()) as u64
}

fn grad_signature(shape: &AttentionShape, math: Math, access: Access) -> Signature {
    Signature {
        reads: vec![
            Operand::read("qkv", shape.qkv(), math.storage()),
            Operand::read("dout", shape.output(), math.storage()),
            Operand::read("lse", shape.per_head(), DType::F32),
            Operand::read("delta", shape.per_head(), DType::F32),
        ],
        writes: vec![Operand::store("dqkv", shape.qkv(), math.storage(), access)],
    }
}

/// The query columns of `dqkv`. With `p_ij = exp(s_ij - lse_i)`, `dp_ij = dout_i · v_j` (fma chain over
/// the head) and `ds_ij = p_ij · (dp_ij - delta_i)`: `dq_i = scale · Σ_j ds_ij · k_j`, an fma chain over
/// ascending `j ≤ i`, scaled once at the end. The key and value columns are left as they are: the
/// next call writes them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionGradQuery {
    pub shape: AttentionShape,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for AttentionGradQuery {
    fn stem(&self) -> &'static str {
        "attention_grad_query"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        grad_signature(&self.shape, self.math, Access::Partial)
    }

    fn flops(&self) -> u64 {
        self.shape.flops(3)
    }

    fn bytes(&self) -> u64 {
        grad_bytes((&self.shape, self.math), self.shape.heads.query_columns())
    }
}

/// The key and value columns of `dqkv`, for query heads of the group ascending and within a head for
/// ascending `i ≥ j`, each one fma chain: `dv_j = Σ p_ij · dout_i`, `dk_j = scale · Σ ds_ij · q_i`,
/// scaled once at the end. The query columns keep their bits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionGradKeyValue {
    pub shape: AttentionShape,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for AttentionGradKeyValue {
    fn stem(&self) -> &'static str {
        "attention_grad_key_value"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        grad_signature(&self.shape, self.math, Access::Update)
    }

    fn flops(&self) -> u64 {
        self.shape.flops(4)
    }

    fn bytes(&self) -> u64 {
        let heads = self.shape.heads;
        grad_bytes(
            (&self.shape, self.math),
            heads.columns() - heads.query_columns(),
        )
    }
}
