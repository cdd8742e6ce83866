//! Placeholder until its branch lands.
use super::arena::Operands;
use super::context::CpuContext;
use crate::error::DeviceError;
use crate::op::rms_norm::*;
pub fn forward(_: &CpuContext, _: &RmsNorm, _: &mut Operands) -> Result<(), DeviceError> {
    Err(DeviceError::OperandMissing {
        op: "rms_norm",
        index: 0,
    })
}
pub fn grad(_: &CpuContext, _: &RmsNormGrad, _: &mut Operands) -> Result<(), DeviceError> {
    Err(DeviceError::OperandMissing {
        op: "rms_norm",
        index: 0,
    })
}
