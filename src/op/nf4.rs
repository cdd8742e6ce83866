//! Weights stored as NF4, back as numbers. Assigns.

use serde::{Deserialize, Serialize};

use super::{OpRule, Operand, Signature, Store};
use crate::num::nf4::{blocks, packed_bytes};
use crate::shape::{DType, Math};

/// `weight[i] = code(packed, i) · maxima[i / 64]`, rounded to f32, then to the storage of products.
///
/// Packed weights are frozen, so there is no derivative.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dequantise {
    pub elements: usize,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for Dequantise {
    fn stem(&self) -> &'static str {
        "nf4_dequantise"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let (bytes, maxima) = (packed_bytes(self.elements), blocks(self.elements));
        Signature {
            reads: vec![
                Operand::read("packed", [bytes], DType::U8),
                Operand::read("maxima", [maxima], DType::F32),
            ],
            writes: vec![Operand::store(
                "weight",
                [self.elements],
                self.math.storage(),
                Store::Assign.access(),
            )],
        }
    }
}
