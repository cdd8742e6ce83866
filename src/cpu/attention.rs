//! Placeholder until its branch lands.
use super::arena::Operands;
use super::context::CpuContext;
use crate::error::DeviceError;
use crate::op::attention::*;
pub fn forward(_: &CpuContext, _: &Attention, _: &mut Operands) -> Result<(), DeviceError> {
    Err(DeviceError::OperandMissing {
        op: "attention",
        index: 0,
    })
}
pub fn delta(_: &CpuContext, _: &AttentionDelta, _: &mut Operands) -> Result<(), DeviceError> {
    Err(DeviceError::OperandMissing {
        op: "attention",
        index: 0,
    })
}
pub fn grad_query(
    _: &CpuContext,
    _: &AttentionGradQuery,
    _: &mut Operands,
) -> Result<(), DeviceError> {
    Err(DeviceError::OperandMissing {
        op: "attention",
        index: 0,
    })
}
pub fn grad_key_value(
    _: &CpuContext,
    _: &AttentionGradKeyValue,
    _: &mut Operands,
) -> Result<(), DeviceError> {
    Err(DeviceError::OperandMissing {
        op: "attention",
        index: 0,
    })
}
