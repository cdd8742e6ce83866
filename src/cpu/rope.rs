//! Placeholder until its branch lands.
use super::arena::Operands;
use super::context::CpuContext;
use crate::error::DeviceError;
use crate::op::rope::*;
pub fn forward(_: &CpuContext, _: &Rope, _: &mut Operands) -> Result<(), DeviceError> {
    Err(DeviceError::OperandMissing {
        op: "rope",
        index: 0,
    })
}
pub fn grad(_: &CpuContext, _: &RopeGrad, _: &mut Operands) -> Result<(), DeviceError> {
    Err(DeviceError::OperandMissing {
        op: "rope",
        index: 0,
    })
}
pub fn norm_forward(_: &CpuContext, _: &QkNormRope, _: &mut Operands) -> Result<(), DeviceError> {
    Err(DeviceError::OperandMissing {
        op: "rope",
        index: 0,
    })
}
pub fn norm_grad(_: &CpuContext, _: &QkNormRopeGrad, _: &mut Operands) -> Result<(), DeviceError> {
    Err(DeviceError::OperandMissing {
        op: "rope",
        index: 0,
    })
}
