//! The recurrent state of a window handed to the next one, on the CPU.

use super::arena::Operands;
use super::context::CpuContext;
use super::rows::expect_len;
use crate::error::DeviceError;
use crate::op::carry_state::CarryState;
use crate::op::step_values::ReportWords;

/// `state = next` unless the step is dropped.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn carry(
    _context: &CpuContext,
    op: &CarryState,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let next: &[f32] = operands.read(0)?;
    let report: &[ReportWords] = operands.read(1)?;
    let state: &mut [f32] = operands.write(0)?;
    expect_len("next", op.elements, next.len())?;
    expect_len("report", 1, report.len())?;
    expect_len("state", op.elements, state.len())?;
    if report.iter().any(|report| report.applied != 0) {
        state.copy_from_slice(next);
    }
    Ok(())
}
