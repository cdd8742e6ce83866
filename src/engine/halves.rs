//! A step in halves: forward, a loss of the caller's, backward. For loops that compute their loss between the two,
//! such as policy gradients.
//!
//! Each half is a program of its own, captured and proven like the step, so these loops replay graphs too. What
//! cannot be is refused before anything changes: backward without the activations of a forward, a limit of the
//! update with a pass that makes none, a step as one program while passes wait for their update.

use super::hyper::Hyper;
use super::programs::RunPrograms;
use super::session::{Session, not_steppable};
use super::step::{Core, Half, StepReport};
use super::trainer::Trainer;
use super::window::{Pass, Then, Window, run_pass};
use crate::backend::Backend;
use crate::data::Batch;
use crate::error::StepError;
use crate::num::element::encode;
use crate::plan::{HalfOutput, ProgramKind};

/// What backward does beyond the gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BackwardOptions {
    /// Whether the update follows, or the gradient waits for the passes after it.
    pub then: Then,
    /// The global norm gradients are clipped to; `None` for no clipping. Belongs to the update.
    pub clip_norm: Option<f64>,
    /// An update with a larger norm is dropped whole; `None` for no limit. Belongs to the update.
    pub spike_norm: Option<f64>,
    /// The caller's loss of this pass, for the report; the losses of a window are added. A loss that is not finite
    /// drops the update.
    pub loss: f32,
}

impl BackwardOptions {
    /// An update with these limits and a loss of 0.
    pub fn update(clip_norm: Option<f64>, spike_norm: Option<f64>) -> Self {
        BackwardOptions {
            then: Then::Update,
            clip_norm,
            spike_norm,
            loss: 0.0,
        }
    }

    /// A gradient that waits for the passes after it.
    pub const ACCUMULATE: BackwardOptions = BackwardOptions {
        then: Then::Keep,
        clip_norm: None,
        spike_norm: None,
        loss: 0.0,
    };

    /// The same with the caller's loss.
    pub fn with_loss(self, loss: f32) -> Self {
        BackwardOptions { loss, ..self }
    }

    /// The hyperparameters with these limits in place of their own.
    ///
    /// # Errors
    /// [`StepError::AccumulateOnly`] for a limit with a pass that makes no update.
    fn limits(&self, hyper: &Hyper) -> Result<Hyper, StepError> {
        let limits = [
            ("clip_norm", self.clip_norm),
            ("spike_norm", self.spike_norm),
        ];
        let set = limits.into_iter().find_map(|(o, limit)| Some((o, limit?)));
        match (self.then, set) {
            (Then::Keep, Some((option, found))) => Err(StepError::AccumulateOnly { option, found }),
            _ => Ok(Hyper {
                clip_norm: self.clip_norm,
                spike_norm: self.spike_norm,
                ..*hyper
            }),
        }
    }
}

/// Where the gradient of forward's output comes from.
enum Gradient<'g> {
    /// From the caller, in f32.
    Given(&'g [f32]),
    /// From the cross-entropy of weighted targets.
    Targets(&'g Batch),
}

impl<B: Backend> Session<B> {
    /// The forward half: the logits of a batch, `[batch · seq_len, vocab_size]`. Its targets and weights are not
    /// looked at. The activations stay for a backward half until another program runs.
    ///
    /// # Errors
    /// [`StepError::NoProgram`] for a plan that is not in halves; a batch that does not fit; a device fault.
    pub fn forward(&mut self, batch: &Batch, hyper: &Hyper) -> Result<Vec<f32>, StepError> {
        let half = self.half_output()?;
        let unscored = Batch {
            normaliser: Some(1.0),
            ..batch.clone()
        };
        match self {
            Session::Warmup(engine) => forward(engine, &unscored, hyper)?,
            Session::Replaying(engine) => forward(engine, &unscored, hyper)?,
            between => return Err(not_steppable(between)),
        }
        Ok(self.read_slot(half.output)?)
    }

    /// As [`Session::forward`], for a backbone alone: the features that come out for these, both
    /// `[batch · seq_len, width]`.
    ///
    /// # Errors
    /// [`StepError::NoFeatures`] for a model of tokens; as [`Session::forward`].
    pub fn forward_half_features(
        &mut self,
        features: &[f32],
        hyper: &Hyper,
    ) -> Result<Vec<f32>, StepError> {
        self.half_output()?;
        let slots = self.features()?;
        self.write_slot(slots.input, features)?;
        let batch = self.no_tokens();
        self.forward(&batch, hyper)
    }

    /// The backward half from the gradient of what forward gave, of the same size: the report of the update, or
    /// `None` where the pass is accumulated.
    ///
    /// # Errors
    /// [`StepError::NoForward`] without the activations of a forward half, [`StepError::AccumulateOnly`] for a limit
    /// with an accumulated pass, [`StepError::TensorSize`] for a gradient of another size,
    /// [`StepError::WindowFull`], [`StepError::OtherNormaliser`]: nothing has changed, and backward may still
    /// follow. A device fault poisons.
    pub fn backward_step(
        &mut self,
        output_grad: &[f32],
        hyper: &Hyper,
        options: &BackwardOptions,
    ) -> Result<Option<StepReport>, StepError> {
        self.backward(Gradient::Given(output_grad), hyper, options)
    }

    /// The backward half from the cross-entropy of a batch's targets, each times its weight, which may have either
    /// sign: with advantages for weights this is the policy gradient. The loss of `options` is not looked at.
    ///
    /// # Errors
    /// As [`Session::backward_step`]; [`StepError::NoProgram`] for a backbone; a batch that does not fit.
    pub fn backward_targets(
        &mut self,
        batch: &Batch,
        hyper: &Hyper,
        options: &BackwardOptions,
    ) -> Result<Option<StepReport>, StepError> {
        self.backward(Gradient::Targets(batch), hyper, options)
    }

    /// The gradient of the features that went into the last backward half, `[batch · seq_len, width]`; with the loss
    /// scale where gradients carry one.
    ///
    /// # Errors
    /// [`StepError::NoFeatures`] for a model of tokens; [`StepError::NoProgram`] for a plan that is not in halves; a
    /// device fault.
    pub fn half_input_gradient(&mut self) -> Result<Vec<f32>, StepError> {
        let slot = self.half_output()?.input_grad;
        Ok(self.read_slot(slot.ok_or(StepError::NoFeatures)?)?)
    }

    fn backward(
        &mut self,
        gradient: Gradient,
        hyper: &Hyper,
        options: &BackwardOptions,
    ) -> Result<Option<StepReport>, StepError> {
        let half = self.half_output()?;
        match self {
            Session::Warmup(engine) => backward(engine, (half, gradient), hyper, options),
            Session::Replaying(engine) => backward(engine, (half, gradient), hyper, options),
            between => Err(not_steppable(between)),
        }
    }

    fn half_output(&self) -> Result<HalfOutput, StepError> {
        let output = self.core().plan.output;
        output.ok_or_else(|| StepError::NoProgram {
            program: ProgramKind::Forward.to_string(),
        })
    }
}

impl<B: Backend> Trainer<B> {
    /// The forward half, as [`Session::forward`] has it. Once warm-up is over, the first forward without an open
    /// window captures and proves every program.
    ///
    /// # Errors
    /// As [`Session::forward`] and [`Trainer::step`].
    pub fn forward(&mut self, batch: &Batch) -> Result<Vec<f32>, StepError> {
        let proof = Batch {
            // Any scored target will do for a proof; a forward half may have none, and weights of zero.
            targets: batch.input_ids.clone(),
            weights: vec![1.0; batch.weights.len()],
            normaliser: None,
            ..batch.clone()
        };
        self.before_forward(&proof)?;
        let hyper = self.hyper;
        self.session_mut().forward(batch, &hyper)
    }

    /// As [`Session::forward_half_features`], with the transitions of [`Trainer::forward`].
    ///
    /// # Errors
    /// As [`Session::forward_half_features`] and [`Trainer::step`].
    pub fn forward_half_features(&mut self, features: &[f32]) -> Result<Vec<f32>, StepError> {
        let proof = self.session().no_tokens();
        self.before_forward(&proof)?;
        let hyper = self.hyper;
        self.session_mut().forward_half_features(features, &hyper)
    }

    /// The backward half, as [`Session::backward_step`] has it.
    ///
    /// # Errors
    /// As [`Session::backward_step`].
    pub fn backward_step(
        &mut self,
        output_grad: &[f32],
        options: &BackwardOptions,
    ) -> Result<Option<StepReport>, StepError> {
        let hyper = self.hyper;
        self.session_mut()
            .backward_step(output_grad, &hyper, options)
    }

    /// The backward half from weighted targets, as [`Session::backward_targets`] has it.
    ///
    /// # Errors
    /// As [`Session::backward_targets`].
    pub fn backward_targets(
        &mut self,
        batch: &Batch,
        options: &BackwardOptions,
    ) -> Result<Option<StepReport>, StepError> {
        let hyper = self.hyper;
        self.session_mut().backward_targets(batch, &hyper, options)
    }

    fn before_forward(&mut self, proof: &Batch) -> Result<(), StepError> {
        if self.warmed_up() && self.session().window().is_none() {
            let hyper = self.hyper;
            self.session_mut().check(proof, &hyper)?;
            self.advance_to_replay(proof)?;
        }
        Ok(())
    }
}

fn forward<B: Backend, E: RunPrograms<B>>(
    engine: &mut E,
    batch: &Batch,
    hyper: &Hyper,
) -> Result<(), StepError> {
    let scalars = engine.core().validate(batch, hyper)?;
    engine.admit_all(&[ProgramKind::Forward], hyper)?;
    engine.core().write_inputs(batch, scalars)?;
    engine.run_program(ProgramKind::Forward, hyper, None)?;
    engine.core().half = Half::Forward;
    Ok(())
}

fn backward<B: Backend, E: RunPrograms<B>>(
    engine: &mut E,
    (half, gradient): (HalfOutput, Gradient),
    hyper: &Hyper,
    options: &BackwardOptions,
) -> Result<Option<StepReport>, StepError> {
    let hyper = options.limits(hyper)?;
    let core = engine.core();
    core.healthy()?;
    if core.half != Half::Forward {
        return Err(StepError::NoForward);
    }
    if options.then == Then::Keep && core.plan.inputs.carried.is_some() {
        return Err(StepError::CarriedPass);
    }
    let mut window = Window {
        passes: 0,
        normaliser: 1.0,
        scored: 0,
        batch: None,
    };
    let (programs, scalars, writes) = match gradient {
        Gradient::Targets(batch) => {
            window.normaliser = batch.normaliser();
            window.scored = batch.active_targets();
            let scalars = core.validate(batch, &hyper)?;
            let targets: Vec<u8> = bytemuck::cast_slice(&batch.targets).to_vec();
            let weights: Vec<u8> = bytemuck::cast_slice(&batch.weights).to_vec();
            let inputs = &core.plan.inputs;
            let writes = vec![(inputs.targets, targets), (inputs.weights, weights)];
            (
                vec![ProgramKind::Score, ProgramKind::Backward],
                scalars,
                writes,
            )
        }
        Gradient::Given(values) => {
            let scalars = hyper.scalars(core.progress.applied + 1, window.normaliser)?;
            core.check_baked(&hyper)?;
            let mut writes = vec![(half.gradient, stored_gradient(core, half, values)?)];
            if let Some(slots) = &core.plan.window {
                writes.push((slots.loss, options.loss.to_le_bytes().to_vec()));
            }
            (vec![ProgramKind::Backward], scalars, writes)
        }
    };
    let pass = Pass {
        programs,
        writes,
        batch: None,
        scalars,
        window,
        then: options.then,
    };
    run_pass(engine, pass, &hyper, None)
}

/// A gradient of the caller's as backward reads it: with the loss scale, rounded once to the storage.
fn stored_gradient<B: Backend>(
    core: &mut Core<B>,
    half: HalfOutput,
    values: &[f32],
) -> Result<Vec<u8>, StepError> {
    let spec = core.plan.slots.spec(half.gradient);
    let (dtype, expected) = (spec.dtype, spec.shape.elements());
    if values.len() != expected {
        return Err(StepError::TensorSize {
            name: "the gradient of forward's output".to_owned(),
            expected,
            found: values.len(),
        });
    }
    encode(dtype, &core.scaled(values)?).ok_or(StepError::NoFeatures)
}
