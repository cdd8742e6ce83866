//! A session whose plan computes a batch in passes.

use super::hyper::Hyper;
use super::session::{Session, not_steppable};
use super::step::{Evaluation, StepReport};
use super::window::Window;
use crate::backend::Backend;
use crate::data::Batch;
use crate::error::StepError;
use crate::num::tree::TreeFold;

impl<B: Backend> Session<B> {
    /// The next pass over a batch that the plan splits; the report of the step when it was the last. Where the
    /// plan does not split a batch this is the step.
    ///
    /// # Errors
    /// As [`Session::step`]; [`StepError::OtherBatch`] for another batch than the one whose passes wait for their
    /// update.
    pub fn pass(&mut self, batch: &Batch, hyper: &Hyper) -> Result<Option<StepReport>, StepError> {
        match self {
            Session::Warmup(engine) => engine.pass(batch, hyper),
            Session::Replaying(engine) => engine.pass(batch, hyper),
            between => Err(not_steppable(between)),
        }
    }

    /// The accumulated passes that no update has taken in yet.
    pub fn window(&self) -> Option<&Window> {
        self.core().window.as_ref()
    }

    /// The loss of a batch; changes nothing that survives a step. Where the plan splits a batch, its passes are
    /// evaluated one after another and their sums are combined by the tree, so the loss has the same bits.
    ///
    /// # Errors
    /// A batch that does not fit; a device fault.
    pub fn evaluate(&mut self, batch: &Batch, hyper: &Hyper) -> Result<Evaluation, StepError> {
        let core = self.core();
        if !core.plan.config.is_split() {
            return self.evaluate_pass(batch, hyper);
        }
        let pass = core.plan.inputs.batch;
        let whole = match batch.batch == pass {
            true => pass,
            false => core.plan.config.batch,
        };
        let scalars = core.validate_of(whole, batch, hyper)?;
        let (mut sums, mut hits) = (TreeFold::new(), 0);
        for start in (0..whole).step_by(pass) {
            let part = batch.sequences(start..start + pass);
            let found = self.evaluate_pass(&part, hyper)?;
            sums.push(found.loss, |a, b| a + b);
            hits += found.hits;
        }
        let sum = sums.finish(|a, b| a + b).unwrap_or(0.0);
        Ok(Evaluation {
            loss: sum * scalars.inv_normaliser,
            hits,
            scored: batch.active_targets(),
        })
    }
}
