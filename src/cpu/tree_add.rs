//! One merge of partial gradients on the CPU.

use rayon::prelude::*;

use super::arena::Operands;
use super::context::CpuContext;
use super::rows::expect_len;
use crate::error::DeviceError;
use crate::op::tree_add::TreeAdd;

/// Elements a task takes.
const BLOCK: usize = 1 << 15;

/// `left = left + right`.
pub fn merge(
    context: &CpuContext,
    op: &TreeAdd,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let right: &[f32] = operands.read(0)?;
    let left: &mut [f32] = operands.write(0)?;
    expect_len("right", op.elements, right.len())?;
    expect_len("left", op.elements, left.len())?;
    context.run(|| {
        let blocks = left.par_chunks_mut(BLOCK).zip(right.par_chunks(BLOCK));
        blocks.for_each(|(left, right)| {
            for (l, r) in left.iter_mut().zip(right) {
                *l += r;
            }
        });
    });
    Ok(())
}
