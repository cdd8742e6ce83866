//! Hands the recurrent state of a window to the next one. Updates, or leaves every bit.

use serde::{Deserialize, Serialize};

use super::step_values::REPORT_WORDS;
use super::{Access, OpRule, Operand, Signature};
use crate::shape::DType;

/// `state = next` where the report says that the step is applied; a dropped step keeps the state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CarryState {
    pub elements: usize,
}

impl OpRule for CarryState {
    fn stem(&self) -> &'static str {
        "carry_state"
    }

    fn signature(&self) -> Signature {
        let elements = [self.elements];
        Signature {
            reads: vec![
                Operand::read("next", elements, DType::F32),
                Operand::read("report", [REPORT_WORDS], DType::U32),
            ],
            writes: vec![Operand::store(
                "state",
                elements,
                DType::F32,
                Access::Update,
            )],
        }
    }
}
