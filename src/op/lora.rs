//! Low-rank adapters beside a frozen product (Hu et al., LoRA, 2021): `y = W x + scale · B (A x)`.
//!
//! Several projections may be one fused product, and adapters may stand on some of them: their `A` lie
//! one above the other as one matrix, and so do their `B`. One call of [`LoraDown`] multiplies by all
//! `A`; one call of [`LoraUp`] adds every part to its own columns of `y` and is the one place where the
//! scale is applied; its gradients apply it in theirs.

use serde::{Deserialize, Serialize};

use super::matmul::Matmul;
use super::{Access, OpCall, OpRule, Operand, Signature, Store};
use crate::error::PlanError;
use crate::grad::GradBuilder;
use crate::num::tree::TokenSum;
use crate::shape::{DType, Math};

/// The columns of a fused product that one adapter adds to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Part {
    /// The first column.
    pub first: usize,
    /// How many columns.
    pub columns: usize,
}

/// The adapters of one product.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Adapters {
    /// Rank of each adapter.
    pub rank: usize,
    /// Columns of the whole product.
    pub n_out: usize,
    /// In ascending order, without overlap.
    pub parts: Vec<Part>,
    /// `alpha / rank`.
    pub scale: f32,
}

impl Adapters {
    /// Columns of `s`: the ranks of all parts side by side.
    pub fn ranks(&self) -> usize {
        self.rank * self.parts.len()
    }

    /// Rows of the stacked `B`.
    pub fn up_rows(&self) -> usize {
        self.parts.iter().map(|p| p.columns).sum()
    }

    /// Bytes of a call that touches `s` and `b` once each and the parts' columns of `y` `times`; of `b` each
    /// element has `b_bytes`.
    fn bytes(&self, rows: usize, storage: DType, (times, b_bytes): (usize, usize)) -> u64 {
        let columns = times * self.up_rows() + self.ranks();
        (rows * columns * storage.size() + self.up_rows() * self.rank * b_bytes) as u64
    }

    fn flops(&self, rows: usize) -> u64 {
        2 * rows as u64 * self.rank as u64 * self.up_rows() as u64
    }
}

/// `s[t, k] = Σ_i x[t, i] · a[k, i]`: the chain of a linear layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraDown {
    pub rows: usize,
    pub n_in: usize,
    /// Ranks of all parts.
    pub ranks: usize,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl LoraDown {
    /// The linear layer that it is.
    pub fn layer(&self) -> Matmul {
        Matmul {
            rows: self.rows,
            n_in: self.n_in,
            n_out: self.ranks,
            bias: false,
            math: self.math,
        }
    }
}

impl OpRule for LoraDown {
    fn stem(&self) -> &'static str {
        "lora_down"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let (storage, access) = (self.math.storage(), Store::Assign.access());
        Signature {
            reads: vec![
                Operand::read("x", [self.rows, self.n_in], storage),
                Operand::read("a", [self.ranks, self.n_in], storage),
            ],
            writes: vec![Operand::store(
                "s",
                [self.rows, self.ranks],
                storage,
                access,
            )],
        }
    }

    fn flops(&self) -> u64 {
        2 * self.rows as u64 * self.n_in as u64 * self.ranks as u64
    }

    fn backward(&self, call: &OpCall, grads: &mut GradBuilder) -> Result<(), PlanError> {
        let (x, a) = (call.reads[0], call.reads[1]);
        let ds = grads.incoming(call.writes[0], self.stem())?;
        // Directly behind the product's own part of the gradient, to which it is added.
        if grads.needs_gradient(x) {
            let (dx, store) = grads.activation_target(x);
            let op = LoraDownGradInput {
                rows: self.rows,
                n_in: self.n_in,
                ranks: self.ranks,
                store,
                math: self.math,
            };
            grads.emit(op, vec![ds, a], vec![dx]);
        }
        self.layer().emit_weight_gradient(grads, (ds, x), a);
        Ok(())
    }
}

/// `dx[t, i] (+)= Σ_k ds[t, k] · a[k, i]`, one chain over ascending `k`; the frozen product's own part
/// of `dx` comes first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraDownGradInput {
    pub rows: usize,
    pub n_in: usize,
    pub ranks: usize,
    pub store: Store,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for LoraDownGradInput {
    fn stem(&self) -> &'static str {
        "lora_down_grad_input"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let (storage, access) = (self.math.storage(), self.store.access());
        Signature {
            reads: vec![
                Operand::read("ds", [self.rows, self.ranks], storage),
                Operand::read("a", [self.ranks, self.n_in], storage),
            ],
            writes: vec![Operand::store(
                "dx",
                [self.rows, self.n_in],
                storage,
                access,
            )],
        }
    }

    fn flops(&self) -> u64 {
        2 * self.rows as u64 * self.n_in as u64 * self.ranks as u64
    }
}

/// `y[t, first + o] = fma(scale, Σ_k s[t, p·rank + k] · b[o, k], y[t, first + o])` for the columns of
/// each part `p`; the others stay as they are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraUp {
    pub rows: usize,
    pub adapters: Adapters,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for LoraUp {
    fn stem(&self) -> &'static str {
        "lora_up"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let (a, storage) = (&self.adapters, self.math.storage());
        Signature {
            reads: vec![
                Operand::read("s", [self.rows, a.ranks()], storage),
                Operand::read("b", [a.up_rows(), a.rank], storage),
            ],
            writes: vec![Operand::store(
                "y",
                [self.rows, a.n_out],
                storage,
                Access::Update,
            )],
        }
    }

    /// Of `y` only the parts' columns are touched.
    fn bytes(&self) -> u64 {
        let storage = self.math.storage();
        self.adapters.bytes(self.rows, storage, (2, storage.size()))
    }

    fn flops(&self) -> u64 {
        self.adapters.flops(self.rows)
    }

    /// The gradient of `y` is that of its old value too, so it stays where it is.
    fn backward(&self, call: &OpCall, grads: &mut GradBuilder) -> Result<(), PlanError> {
        let (s, b) = (call.reads[0], call.reads[1]);
        let dy = grads.incoming(call.writes[0], self.stem())?;
        if grads.is_trainable(b) {
            let db = grads.assigned_parameter_target(b, self.stem())?;
            let outputs = self.adapters.up_rows() * self.adapters.rank;
            let op = LoraUpGradWeight {
                adapters: self.adapters.clone(),
                sum: grads.weight_sum(self.math, self.rows, outputs),
                math: self.math,
            };
            grads.emit(op, vec![dy, s], vec![db]);
        }
        let ds = grads.assigned_activation_target(s, self.stem())?;
        let op = LoraUpGradInput {
            rows: self.rows,
            adapters: self.adapters.clone(),
            math: self.math,
        };
        grads.emit(op, vec![dy, b], vec![ds]);
        Ok(())
    }
}

/// `ds[t, p·rank + k] = scale · Σ_o dy[t, first + o] · b[o, k]`, one chain over ascending `o`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraUpGradInput {
    pub rows: usize,
    pub adapters: Adapters,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for LoraUpGradInput {
    fn stem(&self) -> &'static str {
        "lora_up_grad_input"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let (a, storage) = (&self.adapters, self.math.storage());
        let ds = [self.rows, a.ranks()];
        Signature {
            reads: vec![
                Operand::read("dy", [self.rows, a.n_out], storage),
                Operand::read("b", [a.up_rows(), a.rank], storage),
            ],
            writes: vec![Operand::store("ds", ds, storage, Store::Assign.access())],
        }
    }

    /// Of `dy` only the parts' columns are read.
    fn bytes(&self) -> u64 {
        let storage = self.math.storage();
        self.adapters.bytes(self.rows, storage, (1, storage.size()))
    }

    fn flops(&self) -> u64 {
        self.adapters.flops(self.rows)
    }
}

/// `db[o, k] = scale · Σ_t dy[t, first + o] · s[t, p·rank + k]`, cut and folded as every weight's
/// gradient; the scale multiplies the finished sum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraUpGradWeight {
    pub adapters: Adapters,
    pub sum: TokenSum,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for LoraUpGradWeight {
    fn stem(&self) -> &'static str {
        "lora_up_grad_weight"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let (a, storage, rows) = (&self.adapters, self.math.storage(), self.sum.tokens);
        let db = [a.up_rows(), a.rank];
        Signature {
            reads: vec![
                Operand::read("dy", [rows, a.n_out], storage),
                Operand::read("s", [rows, a.ranks()], storage),
            ],
            writes: vec![Operand::store("db", db, DType::F32, Store::Assign.access())],
        }
    }

    /// Of `dy` only the parts' columns are read.
    fn bytes(&self) -> u64 {
        let f32 = DType::F32.size();
        let storage = self.math.storage();
        self.adapters.bytes(self.sum.tokens, storage, (1, f32))
    }

    fn flops(&self) -> u64 {
        self.adapters.flops(self.sum.tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_columns_of_the_parts_are_counted() {
        let part = |first, columns| Part { first, columns };
        let adapters = Adapters {
            rank: 4,
            n_out: 100,
            parts: vec![part(0, 10), part(50, 20)],
            scale: 1.0,
        };
        let math = Math::Bf16;
        let up = LoraUp {
            rows: 3,
            adapters: adapters.clone(),
            math,
        };
        assert_eq!(up.bytes(), (3 * (2 * 30 + 8) + 30 * 4) * 2);
        let sum = TokenSum {
            tokens: 3,
            grain: 3,
            piece: 3,
        };
        let weight = LoraUpGradWeight {
            adapters,
            sum,
            math,
        };
        assert_eq!(weight.bytes(), 3 * (30 + 8) * 2 + 30 * 4 * 4);
    }
}
