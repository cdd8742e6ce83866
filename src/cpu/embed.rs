//! Placeholder until its branch lands.
use super::arena::Operands;
use super::context::CpuContext;
use crate::error::DeviceError;
use crate::op::embed::*;
pub fn forward(_: &CpuContext, _: &Embed, _: &mut Operands) -> Result<(), DeviceError> {
    Err(DeviceError::OperandMissing {
        op: "embed",
        index: 0,
    })
}
pub fn grad(_: &CpuContext, _: &EmbedGrad, _: &mut Operands) -> Result<(), DeviceError> {
    Err(DeviceError::OperandMissing {
        op: "embed",
        index: 0,
    })
}
