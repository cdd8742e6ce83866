//! The recurrent state of a session: which sequences go on, and the state's way out and in.

use super::session::Session;
use crate::backend::Backend;
use crate::error::StepError;
use crate::op::Slot;
use crate::plan::Carried;

/// How a sequence of the next windows begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// With empty states, as after the end of an episode.
    Fresh,
    /// With the states that the last applied step has left for this sequence.
    Carried,
}

impl<B: Backend> Session<B> {
    /// Says how each sequence begins, from now on until it is said again; at first all are fresh. Steps,
    /// replays and evaluations follow it; only an applied step changes the state.
    ///
    /// # Errors
    /// [`StepError::NoState`] for a model that carries none, [`StepError::TensorSize`] unless there is one
    /// start a sequence; a device fault.
    pub fn set_starts(&mut self, starts: &[Start]) -> Result<(), StepError> {
        let keep = self.carried()?.keep;
        let flags: Vec<u32> = starts
            .iter()
            .map(|&s| (s == Start::Carried).into())
            .collect();
        self.check_elements(keep, flags.len())?;
        let bytes = bytemuck::cast_slice(&flags);
        Ok(self.core_mut().write_bytes(keep, bytes)?)
    }

    /// The whole recurrent state, tensor after tensor in the model's order, each [batch, …].
    ///
    /// # Errors
    /// [`StepError::NoState`] for a model that carries none; a device fault.
    pub fn recurrent_state(&mut self) -> Result<Vec<f32>, StepError> {
        let state = self.carried()?.state;
        Ok(self.read_slot(state)?)
    }

    /// Overwrites the recurrent state with what [`Session::recurrent_state`] gave.
    ///
    /// # Errors
    /// As [`Session::recurrent_state`]; [`StepError::TensorSize`] for a state of another size.
    pub fn set_recurrent_state(&mut self, state: &[f32]) -> Result<(), StepError> {
        let slot = self.carried()?.state;
        self.write_slot(slot, state)
    }

    fn carried(&self) -> Result<&Carried, StepError> {
        let carried = &self.core().plan.inputs.carried;
        carried.as_ref().ok_or(StepError::NoState)
    }

    pub(super) fn check_elements(&self, slot: Slot, found: usize) -> Result<(), StepError> {
        let spec = self.core().plan.slots.spec(slot);
        match spec.shape.elements() == found {
            true => Ok(()),
            false => Err(StepError::TensorSize {
                name: spec.name.clone(),
                expected: spec.shape.elements(),
                found,
            }),
        }
    }
}
