//! What a plan computes again, op by op.

use super::{Plan, cost};

/// One call of every layer, or of some, that backward computes again.
#[derive(Clone, Debug, PartialEq)]
pub struct ComputedAgain {
    /// The stem of the op.
    pub op: &'static str,
    /// What it writes first, without the layer's number.
    pub tensor: String,
    /// In how many layers.
    pub layers: usize,
    /// Bytes of the activations that are not kept for backward because of it, in all layers.
    pub bytes: usize,
    /// What it takes in all layers, by the static rule that chooses within a budget.
    pub seconds: f64,
}

impl Plan {
    /// What backward computes again in a step, or in a pass of it, in the order in which it first does.
    pub fn computed_again(&self) -> Vec<ComputedAgain> {
        let mut all: Vec<ComputedAgain> = Vec::new();
        for unit in &self.repeated {
            let op = unit.ops.last().map_or("", |op| op.rule().stem());
            let seconds: f64 = unit.ops.iter().map(cost::seconds).sum();
            let same = |a: &&mut ComputedAgain| a.op == op && a.tensor == unit.tensor;
            match all.iter_mut().find(same) {
                Some(found) => {
                    found.layers += 1;
                    found.bytes += unit.bytes;
                    found.seconds += seconds;
                }
                None => all.push(ComputedAgain {
                    op,
                    tensor: unit.tensor.clone(),
                    layers: 1,
                    bytes: unit.bytes,
                    seconds,
                }),
            }
        }
        all
    }
}
