//! Placeholder until its branch lands.
use super::arena::Operands;
use super::context::CpuContext;
use crate::error::DeviceError;
use crate::op::swiglu::*;
pub fn forward(_: &CpuContext, _: &SwiGlu, _: &mut Operands) -> Result<(), DeviceError> {
    Err(DeviceError::OperandMissing {
        op: "swiglu",
        index: 0,
    })
}
pub fn grad(_: &CpuContext, _: &SwiGluGrad, _: &mut Operands) -> Result<(), DeviceError> {
    Err(DeviceError::OperandMissing {
        op: "swiglu",
        index: 0,
    })
}
