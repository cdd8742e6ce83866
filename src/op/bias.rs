//! The gradient of a bias; the bias itself is added by the matrix product. Assigns.

use serde::{Deserialize, Serialize};

use super::{OpRule, Operand, Signature, Store};
use crate::num::tree::TokenSum;
use crate::shape::{DType, Math};

/// `dbias[o] = Σ_t dy[t, o]`: a chain of additions over ascending tokens within a piece, pieces and
/// grains folded by the balanced tree.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BiasGrad {
    pub n_out: usize,
    pub sum: TokenSum,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for BiasGrad {
    fn stem(&self) -> &'static str {
        "bias_grad"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let assign = Store::Assign.access();
        Signature {
            reads: vec![Operand::read(
                "dy",
                [self.sum.tokens, self.n_out],
                self.math.storage(),
            )],
            writes: vec![Operand::store("dbias", [self.n_out], DType::F32, assign)],
        }
    }
}
