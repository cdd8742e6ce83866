//! Copies and constants: what partial sums of an accumulation window are kept with. Every op here assigns.

use serde::{Deserialize, Serialize};

use super::{OpRule, Operand, Signature, Store};
use crate::shape::DType;

/// `target = source`, bit for bit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Copy {
    pub elements: usize,
}

impl OpRule for Copy {
    fn stem(&self) -> &'static str {
        "copy"
    }

    fn signature(&self) -> Signature {
        let n = [self.elements];
        Signature {
            reads: vec![Operand::read("source", n, DType::F32)],
            writes: vec![Operand::store(
                "target",
                n,
                DType::F32,
                Store::Assign.access(),
            )],
        }
    }
}

/// `target = -0.0` in every element: the number that leaves every other as it is when it is added, zeros of both
/// signs among them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FillNeutral {
    pub elements: usize,
}

impl OpRule for FillNeutral {
    fn stem(&self) -> &'static str {
        "fill_neutral"
    }

    fn signature(&self) -> Signature {
        Signature {
            reads: Vec::new(),
            writes: vec![Operand::store(
                "target",
                [self.elements],
                DType::F32,
                Store::Assign.access(),
            )],
        }
    }
}
