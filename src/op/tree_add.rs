//! One merge of the balanced tree over partial gradients. Accumulates.

use serde::{Deserialize, Serialize};

use super::{Access, OpRule, Operand, Signature};
use crate::shape::DType;

/// `left = left + right`, elementwise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TreeAdd {
    pub elements: usize,
}

impl OpRule for TreeAdd {
    fn stem(&self) -> &'static str {
        "tree_add"
    }

    fn signature(&self) -> Signature {
        Signature {
            reads: vec![Operand::read("right", [self.elements], DType::F32)],
            writes: vec![Operand::store(
                "left",
                [self.elements],
                DType::F32,
                Access::Update,
            )],
        }
    }
}
