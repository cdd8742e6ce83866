//! Which ops have kernels in which precision.

use crate::error::DeviceError;
use crate::op::Op;
use crate::shape::Math;

/// Checks that there are kernels for an op's precision.
///
/// # Errors
/// [`DeviceError::NoPrecision`] names both; [`DeviceError::NoOp`] an op without any kernel.
pub fn has_kernels(op: &Op) -> Result<(), DeviceError> {
    if !exists(op) {
        let op = op.rule().stem();
        return Err(DeviceError::NoOp { op });
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

/// Whether an op has kernels in any precision.
fn exists(op: &Op) -> bool {
    !matches!(
        op,
        Op::Dequantise(_)
            | Op::LoraDown(_)
            | Op::LoraDownGradInput(_)
            | Op::LoraUp(_)
            | Op::LoraUpGradInput(_)
            | Op::LoraUpGradWeight(_)
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
    use crate::op::lora::LoraDown;
    use crate::op::nf4::Dequantise;
    use crate::op::rope::Heads;

    #[test]
    fn an_op_that_the_device_does_not_have_is_refused_by_name() {
        for math in Math::ALL {
            let down = LoraDown {
                rows: 1,
                n_in: 1,
                ranks: 1,
                math,
            };
            let packed = Dequantise { elements: 64, math };
            for (call, op) in [
                (Op::from(packed), "nf4_dequantise"),
                (Op::from(down), "lora_down"),
            ] {
                assert_eq!(has_kernels(&call), Err(DeviceError::NoOp { op }));
            }
        }
    }

    #[test]
    fn an_op_without_kernels_is_refused_by_name() {
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
