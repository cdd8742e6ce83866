//! Parameters as callers see them, whatever their slots hold: f32, quantised on the way in.

use super::session::Session;
use crate::backend::Backend;
use crate::error::{DeviceError, StepError};
use crate::model::params::Training;
use crate::num::nf4::{self, Packed, Quantisation};
use crate::op::Slot;
use crate::plan::{Param, Stored};

impl<B: Backend> Session<B> {
    /// Writes the values of a parameter, quantised where it is stored as NF4.
    pub(super) fn write_values(&mut self, param: &Param, values: &[f32]) -> Result<(), StepError> {
        let Stored::Packed { maxima, shape } = &param.stored else {
            return self.write_slot(param.slot, values);
        };
        if values.len() != shape.elements() {
            return Err(StepError::TensorSize {
                name: param.name.clone(),
                expected: shape.elements(),
                found: values.len(),
            });
        }
        let how = match param.training {
            Training::Packed(how) => how,
            _ => Quantisation::Once,
        };
        self.write_codes((param, *maxima), &how.pack(values))
    }

    /// Writes the codes and block maxima of a parameter that is stored as NF4.
    pub(super) fn write_packed(&mut self, param: &Param, packed: &Packed) -> Result<(), StepError> {
        match param.stored {
            Stored::Packed { maxima, .. } => self.write_codes((param, maxima), packed),
            _ => Err(StepError::UnknownTensor {
                name: format!("{}.absmax", param.name),
                nearest: param.name.clone(),
            }),
        }
    }

    fn write_codes(
        &mut self,
        (param, maxima): (&Param, Slot),
        packed: &Packed,
    ) -> Result<(), StepError> {
        let spec = self.plan().slots.spec(param.slot);
        if packed.bytes.len() != spec.bytes() {
            return Err(StepError::TensorSize {
                name: param.name.clone(),
                expected: spec.bytes(),
                found: packed.bytes.len(),
            });
        }
        self.core_mut().write_bytes(param.slot, &packed.bytes)?;
        self.write_slot(maxima, &packed.maxima)
    }

    /// Reads the values of a parameter; one stored as NF4 is dequantised.
    pub(super) fn read_values(&mut self, param: &Param) -> Result<Vec<f32>, DeviceError> {
        let Stored::Packed { maxima, shape } = &param.stored else {
            return self.read_slot(param.slot);
        };
        let maxima = self.read_slot(*maxima)?;
        let bytes = self.read_bytes(param.slot)?;
        let mut values = vec![0.0; shape.elements()];
        let blocks = values.chunks_mut(nf4::BLOCK);
        let codes = bytes.chunks(nf4::BLOCK / 2);
        for ((block, codes), maximum) in blocks.zip(codes).zip(maxima) {
            nf4::dequantise_block(codes, maximum, block);
        }
        Ok(values)
    }

    pub(super) fn read_bytes(&mut self, slot: Slot) -> Result<Vec<u8>, DeviceError> {
        let core = self.core_mut();
        let region = core.plan.layout.region(slot);
        let mut bytes = vec![0; region.bytes];
        let read = core.backend.read(&core.arena, region, &mut bytes);
        core.guarded(read)?;
        Ok(bytes)
    }
}
