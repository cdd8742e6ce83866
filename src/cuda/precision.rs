//! Which ops have kernels in which precision.

use crate::error::DeviceError;
use crate::op::Op;
use crate::shape::Math;

/// Checks that there are kernels for an op's precision.
///
/// # Errors
/// [`DeviceError::NoPrecision`] names both.
pub fn has_kernels(op: &Op) -> Result<(), DeviceError> {
    match op.rule().math() {
        Math::F32 => Ok(()),
        _ if attention_serves(op) => Ok(()),
        math => Err(DeviceError::NoPrecision {
            op: op.rule().stem(),
            precision: math.name(),
        }),
    }
}

/// Columns of the largest head that attention's kernels take.
const MOST_COLUMNS: usize = 256;

/// Whether an op is a pass of attention whose head the kernels take.
fn attention_serves(op: &Op) -> bool {
    let shape = match op {
        Op::Attention(op) => &op.shape,
        Op::AttentionGradQuery(op) => &op.shape,
        Op::AttentionGradKeyValue(op) => &op.shape,
        _ => return false,
    };
    shape.heads.head_dim <= MOST_COLUMNS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::swiglu::SwiGlu;

    #[test]
    fn an_op_without_kernels_is_refused_by_name() {
        let of = |math| {
            has_kernels(
                &SwiGlu {
                    rows: 1,
                    d_ff: 2,
                    math,
                }
                .into(),
            )
        };
        assert_eq!(of(Math::F32), Ok(()));
        for math in [Math::Tf32, Math::Bf16, Math::F16] {
            let refused = of(math).expect_err("no kernels");
            let precision = math.name();
            assert_eq!(
                refused,
                DeviceError::NoPrecision {
                    op: "swiglu",
                    precision
                }
            );
        }
    }
}
