//! Copies and constants on the CPU.

use rayon::prelude::*;

use super::arena::Operands;
use super::context::CpuContext;
use super::rows::expect_len;
use crate::error::DeviceError;
use crate::op::copy::{Copy, FillNeutral};

/// Elements a task takes.
const BLOCK: usize = 1 << 15;

/// `target = source`.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn copy(context: &CpuContext, op: &Copy, operands: &mut Operands) -> Result<(), DeviceError> {
    let source: &[f32] = operands.read(0)?;
    let target: &mut [f32] = operands.write(0)?;
    expect_len("source", op.elements, source.len())?;
    expect_len("target", op.elements, target.len())?;
    context.run(|| {
        let blocks = target.par_chunks_mut(BLOCK).zip(source.par_chunks(BLOCK));
        blocks.for_each(|(target, source)| target.copy_from_slice(source));
    });
    Ok(())
}

/// `target = -0.0`.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn fill_neutral(
    context: &CpuContext,
    op: &FillNeutral,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let target: &mut [f32] = operands.write(0)?;
    expect_len("target", op.elements, target.len())?;
    context.run(|| target.par_chunks_mut(BLOCK).for_each(|t| t.fill(-0.0)));
    Ok(())
}
