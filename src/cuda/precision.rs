//! Which ops have kernels, and in which precision.

use crate::error::DeviceError;
use crate::model::mamba_config::{D_CONV_MAX, D_STATE_MAX};
use crate::op::Op;
use crate::op::conv1d::ConvShape;
use crate::op::scan::ScanShape;
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

/// The most positions from one stored state to the next that the scan's backward takes.
const MOST_CHUNK: usize = 1024;

/// The most elements that a kernel counts which serves them without rows.
const MOST_ELEMENTS: usize = u32::MAX as usize;

/// Whether an op has no kernels on this device: a scan or a convolution of sizes that no model has, or a weight of more elements
/// than a kernel counts.
pub(super) fn is_missing(op: &Op) -> bool {
    let scan = |shape: &ScanShape| shape.d_state > D_STATE_MAX || shape.chunk > MOST_CHUNK;
    let convolution = |shape: &ConvShape| shape.d_conv > D_CONV_MAX;
    match op {
        Op::Conv1d(op) => convolution(&op.shape),
        Op::Conv1dGrad(op) => convolution(&op.shape),
        Op::Scan(op) => scan(&op.shape),
        Op::ScanGrad(op) => scan(&op.shape),
        Op::Dequantise(op) => op.elements > MOST_ELEMENTS,
        Op::MatmulGradWeight(op) => op.n_in.saturating_mul(op.n_out) > MOST_ELEMENTS,
        _ => false,
    }
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
    use crate::num::tree::TokenSum;
    use crate::op::Store;
    use crate::op::attention::{Attention, AttentionShape};
    use crate::op::matmul::MatmulGradWeight;
    use crate::op::nf4::Dequantise;
    use crate::op::rope::Heads;
    use crate::op::scan::Scan;

    #[test]
    fn an_op_without_any_kernels_is_refused_by_name() {
        let shape = |d_state, chunk| ScanShape {
            batch: 1,
            seq_len: 1,
            d_inner: 1,
            d_state,
            chunk,
        };
        let of = |d_state, chunk| {
            let (shape, carried, math) = (shape(d_state, chunk), false, Math::F32);
            let op = Scan {
                shape,
                carried,
                math,
            };
            has_kernels(&op.into())
        };
        let refused = Err(DeviceError::NoCudaOp { op: "scan" });
        assert_eq!(of(64, 1024), Ok(()));
        assert_eq!(of(65, 64), refused);
        assert_eq!(of(64, 1025), refused);
    }

    #[test]
    fn a_weight_of_more_elements_than_a_kernel_counts_is_refused() {
        let weight = |n_in, n_out| {
            let sum = TokenSum {
                tokens: 1,
                grain: 1,
                piece: 1,
            };
            let op = MatmulGradWeight {
                n_in,
                n_out,
                sum,
                store: Store::Assign,
                math: Math::F32,
            };
            has_kernels(&op.into())
        };
        let op = "matmul_grad_weight";
        assert_eq!(weight(1 << 16, (1 << 16) - 1), Ok(()));
        assert_eq!(weight(1 << 16, 1 << 16), Err(DeviceError::NoCudaOp { op }));
        let packed = |elements| {
            let math = Math::Bf16;
            has_kernels(&Dequantise { elements, math }.into())
        };
        let op = "nf4_dequantise";
        assert_eq!(packed(MOST_ELEMENTS), Ok(()));
        assert_eq!(packed(MOST_ELEMENTS + 1), Err(DeviceError::NoCudaOp { op }));
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
