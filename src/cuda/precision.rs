//! Which ops have kernels, and in which precision.

use crate::error::DeviceError;
use crate::op::Op;
use crate::shape::Math;

/// Checks that there are kernels for an op and its precision.
///
/// # Errors
/// [`DeviceError::NoCudaOp`] names an op that has none at all, [`DeviceError::NoPrecision`] one that has
/// none in its precision.
pub fn has_kernels(op: &Op) -> Result<(), DeviceError> {
    if is_missing(op) {
        let op = op.rule().stem();
        return Err(DeviceError::NoCudaOp { op });
    }
    let math = op.rule().math();
    match math == Math::F32 || serves(op) {
        true => Ok(()),
        false => Err(DeviceError::NoPrecision {
            op: op.rule().stem(),
            precision: math.name(),
        }),
    }
}

/// Whether an op has no kernels on this device.
pub(super) fn is_missing(op: &Op) -> bool {
    matches!(
        op,
        Op::Conv1d(_)
            | Op::Conv1dGrad(_)
            | Op::SplitColumns(_)
            | Op::SplitColumnsGrad(_)
            | Op::Scan(_)
            | Op::ScanGrad(_)
            | Op::CarryState(_)
    )
}

/// Columns of the largest head that attention's kernels take.
const MOST_COLUMNS: usize = 256;

/// Whether an op has kernels for a precision other than f32: all but attention over larger heads.
fn serves(op: &Op) -> bool {
    let shape = match op {
        Op::Attention(op) => &op.shape,
        Op::AttentionGradQuery(op) => &op.shape,
        Op::AttentionGradKeyValue(op) => &op.shape,
        _ => return true,
    };
    shape.heads.head_dim <= MOST_COLUMNS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::attention::{Attention, AttentionShape};
    use crate::op::rope::Heads;

    #[test]
    fn an_op_without_any_kernels_is_refused_by_name() {
        let op = crate::op::carry_state::CarryState { elements: 1 }.into();
        let refused = DeviceError::NoCudaOp { op: "carry_state" };
        assert_eq!(has_kernels(&op), Err(refused));
    }

    #[test]
    fn an_op_without_kernels_in_a_precision_is_refused_by_name() {
        let of = |math, head_dim| {
            let heads = Heads {
                n_heads: 1,
                n_kv_heads: 1,
                head_dim,
            };
            let shape = AttentionShape {
                batch: 1,
                seq_len: 1,
                heads,
            };
            has_kernels(&Attention { shape, math }.into())
        };
        assert_eq!(of(Math::F32, 320), Ok(()));
        for math in [Math::Tf32, Math::Bf16, Math::F16] {
            assert_eq!(of(math, 256), Ok(()));
            let (op, precision) = ("attention", math.name());
            let refused = Err(DeviceError::NoPrecision { op, precision });
            assert_eq!(of(math, 257), refused);
        }
    }
}
