//! The ops of a step: one file an op, forward and backward together.
//!
//! An op is data: its attributes fix the shape of every operand, what it reads and what it writes.
//! Backends implement ops; programs are lists of calls. Every op states whether it assigns or
//! accumulates. Operands marked [`Access::Update`] are read and written in place.

pub mod adamw;
pub mod attention;
pub mod bias;
pub mod carry_state;
pub mod clip;
pub mod conv1d;
pub mod copy;
pub mod cross_entropy;
pub mod embed;
pub mod lora;
pub mod matmul;
pub mod nf4;
pub mod rms_norm;
pub mod rope;
pub mod scan;
pub mod split_columns;
pub mod step_values;
pub mod swiglu;
pub mod tree_add;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::PlanError;
use crate::grad::GradBuilder;
use crate::shape::{DType, Math, Shape};

/// A tensor of the program: an index into its slot table, never a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Slot(pub u32);

impl Slot {
    /// The index into the slot table.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Whether an op replaces what its output held or adds to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Store {
    /// Every element of the output is written.
    Assign,
    /// Every element of the output becomes its old value plus the result.
    Add,
}

impl Store {
    /// How an output stored this way is touched.
    pub fn access(self) -> Access {
        match self {
            Store::Assign => Access::Write,
            Store::Add => Access::Update,
        }
    }
}

/// How a call touches an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only read.
    Read,
    /// Written whole, never read.
    Write,
    /// Written in part, never read; the next call writes the rest.
    Partial,
    /// Read and written in place.
    Update,
}

/// One operand an op expects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operand {
    /// The operand's name in the op's formula.
    pub name: &'static str,
    /// Expected shape; only the number of elements is binding, so that a view may be reshaped.
    pub shape: Shape,
    pub dtype: DType,
    pub access: Access,
}

impl Operand {
    /// An operand that is read.
    pub fn read(name: &'static str, shape: impl Into<Shape>, dtype: DType) -> Self {
        Operand {
            name,
            shape: shape.into(),
            dtype,
            access: Access::Read,
        }
    }

    /// An operand that is written or updated.
    pub fn store(
        name: &'static str,
        shape: impl Into<Shape>,
        dtype: DType,
        access: Access,
    ) -> Self {
        Operand {
            name,
            shape: shape.into(),
            dtype,
            access,
        }
    }
}

impl Operand {
    /// Bytes that are moved when every element is touched once in each way that the access names.
    pub fn traffic(&self) -> u64 {
        let once = (self.shape.elements() * self.dtype.size()) as u64;
        match self.access {
            Access::Read | Access::Write | Access::Partial => once,
            Access::Update => 2 * once,
        }
    }
}

/// All operands of an op, in the order a call lists them: first `reads`, then `writes`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    pub reads: Vec<Operand>,
    pub writes: Vec<Operand>,
}

/// What every op states about itself.
pub trait OpRule {
    /// The op's name: the stem of its files on every backend.
    fn stem(&self) -> &'static str;

    /// The operands it takes, fixed by its attributes.
    fn signature(&self) -> Signature;

    /// How its products are computed and its activations stored.
    fn math(&self) -> Math {
        Math::F32
    }

    /// Floating-point operations of one call, a multiply-add counted as two; 0 where bytes decide.
    fn flops(&self) -> u64 {
        0
    }

    /// Bytes that one call moves at least: each operand read once where it is read and written once
    /// where it is written.
    fn bytes(&self) -> u64 {
        let signature = self.signature();
        let operands = signature.reads.iter().chain(&signature.writes);
        operands.map(Operand::traffic).sum()
    }

    /// Whether backward can write the op's first output again, with forward's bits: then what backward reads of it may
    /// wait for that.
    fn is_restorable(&self) -> bool {
        false
    }

    /// The call that writes some of this call's outputs again, with the same bits, from another of its outputs: what
    /// stands where that one is kept and the others are not. `None` for ops whose outputs do not follow from each other.
    fn again_from_output(&self, _call: &OpCall) -> Option<OpCall> {
        None
    }

    /// Emits the calls that carry gradients from this call's outputs to its inputs.
    ///
    /// # Errors
    /// [`PlanError::NoBackward`] unless the op has a derivative.
    fn backward(&self, call: &OpCall, grads: &mut GradBuilder) -> Result<(), PlanError> {
        Err(PlanError::NoBackward {
            op: self.stem(),
            tensor: grads.first_write_name(call),
        })
    }
}

/// One call of the program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpCall {
    pub op: Op,
    /// Operands that are only read.
    pub reads: Vec<Slot>,
    /// Operands that are written or updated in place.
    pub writes: Vec<Slot>,
}

impl OpCall {
    /// The slots that it updates in place.
    pub fn updated(&self) -> impl Iterator<Item = Slot> {
        let operands = self.op.rule().signature().writes.into_iter();
        let both = operands.zip(&self.writes);
        both.filter(|(operand, _)| operand.access == Access::Update)
            .map(|(_, &slot)| slot)
    }
}

macro_rules! ops {
    ($($variant:ident($path:path)),+ $(,)?) => {
        /// The closed set of ops.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        pub enum Op { $($variant($path)),+ }

        impl Op {
            /// The op's own statements about itself.
            pub fn rule(&self) -> &dyn OpRule {
                match self { $(Op::$variant(op) => op),+ }
            }
        }

        $(impl From<$path> for Op {
            fn from(op: $path) -> Self { Op::$variant(op) }
        })+
    };
}

ops! {
    Embed(embed::Embed),
    EmbedGrad(embed::EmbedGrad),
    EmbedFrozen(embed::EmbedFrozen),
    RmsNorm(rms_norm::RmsNorm),
    RmsNormGrad(rms_norm::RmsNormGrad),
    Matmul(matmul::Matmul),
    MatmulGradInput(matmul::MatmulGradInput),
    MatmulGradWeight(matmul::MatmulGradWeight),
    BiasGrad(bias::BiasGrad),
    Rope(rope::Rope),
    RopeGrad(rope::RopeGrad),
    QkNormRope(rope::QkNormRope),
    QkNormRopeGrad(rope::QkNormRopeGrad),
    Attention(attention::Attention),
    AttentionDelta(attention::AttentionDelta),
    AttentionGradQuery(attention::AttentionGradQuery),
    AttentionGradKeyValue(attention::AttentionGradKeyValue),
    SwiGlu(swiglu::SwiGlu),
    SwiGluGrad(swiglu::SwiGluGrad),
    Conv1d(conv1d::Conv1d),
    Conv1dGrad(conv1d::Conv1dGrad),
    SplitColumns(split_columns::SplitColumns),
    SplitColumnsGrad(split_columns::SplitColumnsGrad),
    Scan(scan::Scan),
    ScanGrad(scan::ScanGrad),
    CarryState(carry_state::CarryState),
    CrossEntropy(cross_entropy::CrossEntropy),
    LossSum(cross_entropy::LossSum),
    TreeAdd(tree_add::TreeAdd),
    Copy(copy::Copy),
    FillNeutral(copy::FillNeutral),
    GradSquares(clip::GradSquares),
    Clip(clip::Clip),
    AdamW(adamw::AdamW),
    Dequantise(nf4::Dequantise),
    LoraDown(lora::LoraDown),
    LoraDownGradInput(lora::LoraDownGradInput),
    LoraUp(lora::LoraUp),
    LoraUpGradInput(lora::LoraUpGradInput),
    LoraUpGradWeight(lora::LoraUpGradWeight),
}

/// The op's name and its attributes as `stem{key=value,…}`, the form manifests hold.
impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = serde_json::to_value(self).map_err(|_| fmt::Error)?;
        write!(f, "{}", self.rule().stem())?;
        match value.as_object().and_then(|o| o.values().next()) {
            Some(attributes) => write_attributes(f, attributes),
            None => Ok(()),
        }
    }
}

fn write_attributes(f: &mut fmt::Formatter<'_>, value: &serde_json::Value) -> fmt::Result {
    use serde_json::Value;
    match value {
        Value::Object(map) => {
            write!(f, "{{")?;
            for (i, (key, v)) in map.iter().enumerate() {
                let comma = if i > 0 { "," } else { "" };
                write!(f, "{comma}{key}=")?;
                write_attributes(f, v)?;
            }
            write!(f, "}}")
        }
        Value::String(s) => write!(f, "{s}"),
        // Every fractional attribute is an f32; printed as one, it is the shortest text that
        // reads back to the same bits.
        Value::Number(n) if n.is_f64() => match n.as_f64() {
            Some(x) => write!(f, "{:e}", x as f32),
            None => Err(fmt::Error),
        },
        other => write!(f, "{other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::num::tree::TokenSum;
    use attention::{Attention, AttentionGradKeyValue, AttentionGradQuery, AttentionShape};

    #[test]
    fn bytes_count_every_operand_once_a_way_and_only_what_is_touched() {
        let add = tree_add::TreeAdd { elements: 10 };
        assert_eq!(add.bytes(), 3 * 40, "read right, read and write left");
        let embed = embed::Embed {
            rows: 3,
            vocab_size: 1000,
            d_model: 5,
        };
        assert_eq!(embed.bytes(), 3 * 4 + 2 * 3 * 5 * 4);
        let grad = |store| embed::EmbedGrad {
            vocab_size: 1000,
            d_model: 5,
            sum: TokenSum {
                tokens: 3,
                grain: 3,
                piece: 3,
            },
            store,
        };
        assert_eq!(grad(Store::Add).bytes(), 12 + 60);
        assert_eq!(grad(Store::Assign).bytes(), 12 + 60 + 20_000);
        let heads = rope::Heads {
            n_heads: 4,
            n_kv_heads: 2,
            head_dim: 8,
        };
        let rope = rope::Rope {
            math: Math::F32,
            rows: 6,
            seq_len: 3,
            heads,
        };
        assert_eq!(rope.bytes(), 3 * 4 * 2 * 4 + 2 * 6 * 6 * 8 * 4);
        let shape = AttentionShape {
            batch: 2,
            seq_len: 3,
            heads,
        };
        let (rows, four) = (6, 4);
        let forward = rows * (64 + 32 + 4) * four;
        assert_eq!(
            Attention {
                shape,
                math: Math::F32
            }
            .bytes(),
            forward
        );
        let reads = rows * (64 + 32 + 4 + 4) * four;
        let query = AttentionGradQuery {
            shape,
            math: Math::F32,
        }
        .bytes();
        assert_eq!(query, reads + rows * 32 * four);
        let key_value = AttentionGradKeyValue {
            shape,
            math: Math::F32,
        }
        .bytes();
        assert_eq!(key_value, reads + rows * 32 * four);
    }
}
