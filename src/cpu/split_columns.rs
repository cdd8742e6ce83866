//! The columns of a matrix as two matrices on the CPU.

use rayon::prelude::*;

use super::arena::Operands;
use super::context::CpuContext;
use super::rows::{expect_len, rows_per_task};
use crate::error::DeviceError;
use crate::op::split_columns::{SplitColumns, SplitColumnsGrad};

/// `left` and `right` from `x`.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn forward(
    context: &CpuContext,
    op: &SplitColumns,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let (a, b) = (op.n_left, op.n_right);
    let x: &[f32] = operands.read(0)?;
    let left: &mut [f32] = operands.write(0)?;
    let right: &mut [f32] = operands.write(1)?;
    expect_len("x", op.rows * (a + b), x.len())?;
    expect_len("left", op.rows * a, left.len())?;
    expect_len("right", op.rows * b, right.len())?;
    if a == 0 || b == 0 {
        // One side is everything.
        if a == 0 {
            right.copy_from_slice(x);
        } else {
            left.copy_from_slice(x);
        }
        return Ok(());
    }
    let rows = rows_per_task(a + b);
    context.run(|| {
        let outputs = left.par_chunks_mut(rows * a);
        let outputs = outputs.zip(right.par_chunks_mut(rows * b));
        let tasks = outputs.zip(x.par_chunks(rows * (a + b)));
        tasks.for_each(|((left, right), x)| {
            let outputs = left.chunks_exact_mut(a).zip(right.chunks_exact_mut(b));
            for ((left, right), x) in outputs.zip(x.chunks_exact(a + b)) {
                left.copy_from_slice(&x[..a]);
                right.copy_from_slice(&x[a..]);
            }
        });
    });
    Ok(())
}

/// `dx` from `dleft` and `dright`.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn grad(
    context: &CpuContext,
    op: &SplitColumnsGrad,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let (a, b) = (op.n_left, op.n_right);
    let left: &[f32] = operands.read(0)?;
    let right: &[f32] = operands.read(1)?;
    let dx: &mut [f32] = operands.write(0)?;
    expect_len("dleft", op.rows * a, left.len())?;
    expect_len("dright", op.rows * b, right.len())?;
    expect_len("dx", op.rows * (a + b), dx.len())?;
    if a + b == 0 {
        return Ok(());
    }
    context.run(|| {
        let rows = dx.par_chunks_exact_mut(a + b).enumerate();
        rows.with_min_len(rows_per_task(a + b))
            .for_each(|(row, dx)| {
                dx[..a].copy_from_slice(&left[row * a..][..a]);
                dx[a..].copy_from_slice(&right[row * b..][..b]);
            });
    });
    Ok(())
}
