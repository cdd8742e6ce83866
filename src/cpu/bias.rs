//! Placeholder until its branch lands.
use super::arena::Operands;
use super::context::CpuContext;
use crate::error::DeviceError;
use crate::op::bias::*;
pub fn grad(_: &CpuContext, _: &BiasGrad, _: &mut Operands) -> Result<(), DeviceError> {
    Err(DeviceError::OperandMissing {
        op: "bias",
        index: 0,
    })
}
