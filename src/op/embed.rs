//! Token embedding. Forward assigns; backward assigns or accumulates, as its `store` says.

use serde::{Deserialize, Serialize};

use super::{OpCall, OpRule, Operand, Signature, Store};
use crate::error::PlanError;
use crate::grad::GradBuilder;
use crate::num::tree::TokenSum;
use crate::shape::{DType, Math};

/// `x[t] = table[ids[t]]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Embed {
    pub rows: usize,
    pub vocab_size: usize,
    pub d_model: usize,
}

impl OpRule for Embed {
    fn stem(&self) -> &'static str {
        "embed"
    }

    fn signature(&self) -> Signature {
        Signature {
            reads: vec![
                Operand::read("ids", [self.rows], DType::I32),
                Operand::read("table", [self.vocab_size, self.d_model], DType::F32),
            ],
            writes: vec![Operand::store(
                "x",
                [self.rows, self.d_model],
                DType::F32,
                Store::Assign.access(),
            )],
        }
    }

    /// Of the table only the rows of the ids are read.
    fn bytes(&self) -> u64 {
        let rows = (self.rows * self.d_model * DType::F32.size()) as u64;
        (self.rows * DType::I32.size()) as u64 + 2 * rows
    }

    fn backward(&self, call: &OpCall, grads: &mut GradBuilder) -> Result<(), PlanError> {
        let table = call.reads[1];
        if !grads.is_trainable(table) {
            return Ok(());
        }
        let dx = grads.incoming(call.writes[0], self.stem())?;
        let (dtable, store) = grads.parameter_target(table);
        let op = EmbedGrad {
            vocab_size: self.vocab_size,
            d_model: self.d_model,
            sum: grads.token_sum(self.rows, None),
            store,
        };
        grads.emit(op, vec![call.reads[0], dx], vec![dtable]);
        Ok(())
    }
}

/// As [`Embed`] for a table that is never trained and that the head's product may read too, so that it is
/// stored once, as products read it; widening a row is exact.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EmbedFrozen {
    pub rows: usize,
    pub vocab_size: usize,
    pub d_model: usize,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for EmbedFrozen {
    fn stem(&self) -> &'static str {
        "embed_frozen"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let table = [self.vocab_size, self.d_model];
        Signature {
            reads: vec![
                Operand::read("ids", [self.rows], DType::I32),
                Operand::read("table", table, self.math.storage()),
            ],
            writes: vec![Operand::store(
                "x",
                [self.rows, self.d_model],
                DType::F32,
                Store::Assign.access(),
            )],
        }
    }

    /// Of the table only the rows of the ids are read.
    fn bytes(&self) -> u64 {
        let of_element = self.math.storage().size() + DType::F32.size();
        (self.rows * (DType::I32.size() + self.d_model * of_element)) as u64
    }
}

/// `dtable[v] (+)= Σ over positions t with ids[t] = v of dx[t]`.
///
/// Within a grain the sum is one chain of additions over ascending positions; grains are combined
/// by the balanced tree. With [`Store::Add`] rows of ids that do not occur keep their bits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EmbedGrad {
    pub vocab_size: usize,
    pub d_model: usize,
    pub sum: TokenSum,
    pub store: Store,
}

impl OpRule for EmbedGrad {
    fn stem(&self) -> &'static str {
        "embed_grad"
    }

    fn signature(&self) -> Signature {
        let rows = self.sum.tokens;
        Signature {
            reads: vec![
                Operand::read("ids", [rows], DType::I32),
                Operand::read("dx", [rows, self.d_model], DType::F32),
            ],
            writes: vec![Operand::store(
                "dtable",
                [self.vocab_size, self.d_model],
                DType::F32,
                self.store.access(),
            )],
        }
    }

    /// What is added touches only rows of ids that occur; as few as one row may.
    fn bytes(&self) -> u64 {
        let signature = self.signature();
        let operands = match self.store {
            Store::Assign => signature.reads.iter().chain(&signature.writes),
            Store::Add => signature.reads.iter().chain(&[]),
        };
        operands.map(Operand::traffic).sum()
    }
}
