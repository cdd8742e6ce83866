//! Which ops have kernels in which precision.

use crate::error::DeviceError;
use crate::op::Op;

/// Checks that there are kernels for an op's precision.
///
/// # Errors
/// [`DeviceError::NoPrecision`] names both.
pub fn has_kernels(op: &Op) -> Result<(), DeviceError> {
    let math = op.rule().math();
    match math.is_f32() || serves(op) {
        true => Ok(()),
        false => Err(DeviceError::NoPrecision {
            op: op.rule().stem(),
            precision: math.name(),
        }),
    }
}

/// Whether an op has kernels for a precision other than f32.
fn serves(op: &Op) -> bool {
    match op {
        Op::Matmul(_) | Op::MatmulGradInput(_) | Op::MatmulGradWeight(_) => false,
        Op::Attention(_) | Op::AttentionGradQuery(_) | Op::AttentionGradKeyValue(_) => false,
        // No product: tf32 is stored as f32 and computed as f32.
        Op::RmsNorm(_)
        | Op::RmsNormGrad(_)
        | Op::Rope(_)
        | Op::RopeGrad(_)
        | Op::QkNormRope(_)
        | Op::QkNormRopeGrad(_)
        | Op::BiasGrad(_)
        | Op::CrossEntropy(_)
        | Op::AttentionDelta(_)
        | Op::Clip(_)
        | Op::AdamW(_)
        | Op::SwiGlu(_)
        | Op::SwiGluGrad(_) => true,
        // These are the same in every precision.
        Op::Embed(_) | Op::EmbedGrad(_) | Op::LossSum(_) | Op::TreeAdd(_) | Op::GradSquares(_) => {
            true
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::matmul::Matmul;
    use crate::op::swiglu::SwiGlu;
    use crate::shape::Math;

    #[test]
    fn an_op_without_kernels_is_refused_by_name() {
        let of = |math| {
            has_kernels(
                &Matmul {
                    rows: 1,
                    n_in: 1,
                    n_out: 1,
                    bias: false,
                    math,
                }
                .into(),
            )
        };
        assert_eq!(of(Math::F32), Ok(()));
        for math in [Math::Tf32, Math::Bf16, Math::F16] {
            let (op, precision) = ("matmul", math.name());
            assert_eq!(of(math), Err(DeviceError::NoPrecision { op, precision }));
        }
    }

    #[test]
    fn an_op_without_products_has_kernels_in_every_precision() {
        for math in Math::ALL {
            let (rows, d_ff) = (1, 2);
            assert_eq!(has_kernels(&SwiGlu { rows, d_ff, math }.into()), Ok(()));
        }
    }
}
