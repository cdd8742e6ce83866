//! A session over a backbone alone: features in and out, and the gradient of what came out from the caller.

use super::hyper::Hyper;
use super::session::Session;
use super::step::StepReport;
use crate::backend::Backend;
use crate::data::{Batch, IGNORE};
use crate::error::StepError;
use crate::plan::Features;

impl<B: Backend> Session<B> {
    /// The features that come out for these, both `[batch · seq_len, width]`; changes nothing that survives
    /// a step.
    ///
    /// # Errors
    /// [`StepError::NoFeatures`] for a model of tokens, [`StepError::TensorSize`] for another number of
    /// values; as [`Session::evaluate`].
    pub fn forward_features(
        &mut self,
        features: &[f32],
        hyper: &Hyper,
    ) -> Result<Vec<f32>, StepError> {
        let slots = self.features()?;
        self.write_slot(slots.input, features)?;
        let batch = self.no_tokens();
        self.evaluate(&batch, hyper)?;
        self.output_features()
    }

    /// One step on these features with this gradient of what comes out for them, both
    /// `[batch · seq_len, width]`: forward, backward, clip and AdamW. The report's loss is 0, as the loss is
    /// the caller's.
    ///
    /// # Errors
    /// As [`Session::forward_features`] and [`Session::step`].
    pub fn step_features(
        &mut self,
        features: &[f32],
        output_grad: &[f32],
        hyper: &Hyper,
    ) -> Result<StepReport, StepError> {
        self.write_features(features, output_grad)?;
        let batch = self.no_tokens();
        self.step(&batch, hyper)
    }

    /// Writes what [`Session::step_features`] takes, for steps over [`Session::no_tokens`]: they read it until it is
    /// written again.
    ///
    /// # Errors
    /// As [`Session::forward_features`].
    pub fn write_features(
        &mut self,
        features: &[f32],
        output_grad: &[f32],
    ) -> Result<(), StepError> {
        let slots = self.features()?;
        self.write_slot(slots.input, features)?;
        let scaled = self.core_mut().scaled(output_grad)?;
        self.write_slot(slots.output_grad, &scaled)
    }

    /// The features that came out of the last step or evaluation, `[batch · seq_len, width]`.
    ///
    /// # Errors
    /// [`StepError::NoFeatures`] for a model of tokens; a device fault.
    pub fn output_features(&mut self) -> Result<Vec<f32>, StepError> {
        let slots = self.core().plan.backbone.ok_or(StepError::NoFeatures)?;
        Ok(self.read_slot(slots.output)?)
    }

    /// The gradient of the features that went into the last step, `[batch · seq_len, width]`; with the step's
    /// loss scale where gradients carry one.
    ///
    /// # Errors
    /// [`StepError::NoFeatures`] for a model of tokens; a device fault.
    pub fn input_gradient(&mut self) -> Result<Vec<f32>, StepError> {
        let slots = self.core().plan.backbone.ok_or(StepError::NoFeatures)?;
        Ok(self.read_slot(slots.input_grad)?)
    }

    pub(super) fn features(&self) -> Result<Features, StepError> {
        self.core()
            .plan
            .inputs
            .features
            .ok_or(StepError::NoFeatures)
    }

    /// What a step of a backbone takes for its batch: nothing is read and nothing scored.
    pub fn no_tokens(&self) -> Batch {
        let inputs = &self.core().plan.inputs;
        Batch {
            batch: inputs.batch,
            seq_len: inputs.seq_len,
            input_ids: vec![0; inputs.rows()],
            targets: vec![IGNORE; inputs.rows()],
            weights: vec![1.0; inputs.rows()],
            normaliser: Some(1.0),
        }
    }
}
