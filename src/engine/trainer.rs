//! The call a training loop uses: `step`, which warms up, captures and proves by itself.

use std::ops::Range;
use std::sync::Arc;

use super::hyper::Hyper;
use super::init::ParamSource;
use super::session::{LoadError, Session};
use super::state::FEWEST_WARMUP_STEPS;
use super::step::{Evaluation, Observe, StepReport};
use crate::backend::Backend;
use crate::data::Batch;
use crate::error::{CaptureError, DeviceError, StepError};
use crate::plan::Plan;

/// Trains a model step by step: a few eager steps, then guarded replays of a proven graph.
///
/// ```
/// use std::sync::Arc;
/// use bitstep::cpu::{CpuBackend, context::CpuContext, simd::SimdPath};
/// use bitstep::data::Batch;
/// use bitstep::engine::{Hyper, Trainer, init::FreshInit};
/// use bitstep::model::{config::{Family, ModelConfig}, decoder::Decoder};
/// use bitstep::plan::{Plan, PlanConfig};
///
/// let model = Decoder::new(ModelConfig {
///     family: Family::Llama, vocab_size: 16, d_model: 16, n_layers: 1, n_heads: 2, n_kv_heads: 1,
///     head_dim: 8, d_ff: 32, rope_theta: 10_000.0, rms_norm_eps: 1e-5, tie_embeddings: false,
///     max_seq_len: 4, init_std: 0.02,
/// });
/// let plan = Plan::build(&model, PlanConfig::of(1, 4))?;
/// let cpu = CpuBackend::new(CpuContext::new(SimdPath::detect(), 1)?);
/// let mut trainer = Trainer::new(cpu, Arc::new(plan), Hyper::default(), 2)?;
/// trainer.load(&FreshInit { seed: 1 })?;
/// let batch = Batch {
///     batch: 1, seq_len: 4, input_ids: vec![1, 2, 3, 4], targets: vec![2, 3, 4, 5],
///     weights: vec![1.0; 4], normaliser: None,
/// };
/// let first = trainer.step(&batch)?;
/// trainer.set_lr(1e-2);
/// for _ in 0..4 {
///     trainer.step(&batch)?;
/// }
/// assert!(trainer.session().state_name() == "replaying");
/// assert!(trainer.step(&batch)?.loss < first.loss);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Trainer<B: Backend> {
    /// `None` only while a transition takes the session and gives it back.
    session: Option<Session<B>>,
    pub(super) hyper: Hyper,
    warmup_steps: u32,
}

impl<B: Backend> Trainer<B> {
    /// A trainer over a plan; it captures after `warmup_steps` eager steps (at least 2).
    ///
    /// # Errors
    /// The arena does not fit, or the device fails.
    pub fn new(
        backend: B,
        plan: Arc<Plan>,
        hyper: Hyper,
        warmup_steps: u32,
    ) -> Result<Self, DeviceError> {
        Ok(Trainer {
            session: Some(Session::new(backend, plan)?),
            hyper,
            warmup_steps: warmup_steps.max(FEWEST_WARMUP_STEPS),
        })
    }

    /// Fills every parameter from a source.
    ///
    /// # Errors
    /// The source's own, or values that do not fit.
    pub fn load<S: ParamSource>(&mut self, source: &S) -> Result<(), LoadError<S::Error>> {
        self.session_mut().load(source)
    }

    /// One step over a batch. The step after the last warm-up step captures and proves first; when
    /// that step is one that is dropped, a proof would show nothing, so it runs eagerly and warm-up
    /// begins again.
    ///
    /// # Errors
    /// A batch of the wrong shape, a token outside the vocabulary, a hyperparameter that is not a
    /// usable number, a guard that trips: nothing has changed. A device fault poisons the trainer.
    pub fn step(&mut self, batch: &Batch) -> Result<StepReport, StepError> {
        self.step_observed(batch, None)
    }

    /// One step; while it is eager, the observer looks at the arena after every call.
    ///
    /// # Errors
    /// As [`Trainer::step`].
    pub fn step_observed(
        &mut self,
        batch: &Batch,
        observer: Option<&mut dyn Observe<B>>,
    ) -> Result<StepReport, StepError> {
        if self.warmed_up() {
            // A batch that does not fit is told as such, before any transition.
            let hyper = self.hyper;
            self.session_mut().check(batch, &hyper)?;
            self.advance_to_replay(batch)?;
        }
        let hyper = self.hyper;
        self.session_mut().step_observed(batch, &hyper, observer)
    }

    /// The next pass over a batch that the plan splits; the report of the step when it was the last. A checkpoint
    /// can be taken between passes. Where the plan does not split a batch this is the step.
    ///
    /// # Errors
    /// As [`Trainer::step`]; [`StepError::OtherBatch`] for another batch than the one whose passes wait for their
    /// update.
    pub fn pass(&mut self, batch: &Batch) -> Result<Option<StepReport>, StepError> {
        let hyper = self.hyper;
        if self.warmed_up() {
            self.session_mut().check(batch, &hyper)?;
            self.advance_to_replay(batch)?;
        }
        self.session_mut().pass(batch, &hyper)
    }

    /// Takes the next transition towards replay (record, capture, proof) when warm-up is over, and gives
    /// the name of the state the trainer is in then. [`Trainer::step`] does so by itself; a caller that
    /// wants to know what each of them costs calls this until it says `replaying`.
    ///
    /// # Errors
    /// A batch that does not fit; as [`Session::advance`].
    pub fn advance(&mut self, batch: &Batch) -> Result<&'static str, StepError> {
        let hyper = self.hyper;
        self.session_mut().check(batch, &hyper)?;
        if self.warmed_up()
            && let Some(session) = self.session.take()
        {
            let (session, outcome) = session.advance(batch, &hyper);
            self.session = Some(session);
            outcome?;
        }
        Ok(self.session().state_name())
    }

    /// The loss of a batch; changes nothing that survives a step.
    ///
    /// # Errors
    /// A batch that does not fit; a device fault.
    pub fn evaluate(&mut self, batch: &Batch) -> Result<Evaluation, StepError> {
        let hyper = self.hyper;
        self.session_mut().evaluate(batch, &hyper)
    }

    /// The logits of a batch, `[batch · seq_len, vocab_size]`.
    ///
    /// # Errors
    /// A batch that does not fit; a device fault.
    pub fn logits(&mut self, batch: &Batch) -> Result<Vec<f32>, StepError> {
        let hyper = self.hyper;
        self.session_mut().logits(batch, &hyper)
    }

    /// The logits of some positions of a batch, counted row-major, `[positions, vocab_size]`.
    ///
    /// # Errors
    /// Positions beyond the batch, a batch that does not fit, a device fault.
    pub fn logits_of(
        &mut self,
        positions: Range<usize>,
        batch: &Batch,
    ) -> Result<Vec<f32>, StepError> {
        let hyper = self.hyper;
        self.session_mut().logits_of(positions, batch, &hyper)
    }

    /// Sets the learning rate of the next step; nothing is captured again.
    pub fn set_lr(&mut self, lr: f64) {
        self.hyper.lr = lr;
    }

    /// The hyperparameters of the next step. `beta1`, `beta2` and `eps` are part of the captured
    /// program: changing them makes the next step a typed refusal.
    pub fn hyper_mut(&mut self) -> &mut Hyper {
        &mut self.hyper
    }

    /// The session underneath.
    pub fn session(&self) -> &Session<B> {
        self.session
            .as_ref()
            .expect("a transition always gives the session back")
    }

    /// The session underneath, to read and write parameters.
    pub fn session_mut(&mut self) -> &mut Session<B> {
        self.session
            .as_mut()
            .expect("a transition always gives the session back")
    }

    /// Back to warm-up: the next steps run eagerly again. Weights and counters stay.
    pub fn thaw(&mut self) {
        self.session = self.session.take().map(Session::thaw);
    }

    pub(super) fn warmed_up(&self) -> bool {
        match self.session() {
            Session::Warmup(engine) => engine.warmup_steps() >= self.warmup_steps,
            Session::Recorded(_) | Session::Captured(_) => true,
            Session::Replaying(_) => false,
        }
    }

    pub(super) fn advance_to_replay(&mut self, batch: &Batch) -> Result<(), CaptureError> {
        let hyper = self.hyper;
        while !matches!(self.session(), Session::Replaying(_)) {
            let Some(session) = self.session.take() else {
                return Ok(());
            };
            let (session, outcome) = session.advance(batch, &hyper);
            self.session = Some(session);
            if let Err(CaptureError::ProofStepDropped { .. }) = outcome {
                self.thaw();
                return Ok(());
            }
            outcome?;
        }
        Ok(())
    }
}
