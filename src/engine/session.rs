//! An engine in any state, for callers that cannot be generic over it: the command line, bindings.

use std::ops::Range;
use std::sync::Arc;

use super::hyper::Hyper;
use super::init::ParamSource;
use super::snapshot::Snapshot;
use super::state::{Captured, Engine, Recorded, Refused, Replaying, State, Warmup};
use super::step::{Core, Evaluation, Half, Observe, Progress, StepReport, root};
use crate::backend::{Backend, DeviceInfo, Execution};
use crate::data::Batch;
use crate::error::{CaptureError, DeviceError, StepError};
use crate::layout::{PlacedCall, Region};
use crate::manifest::Manifest;
use crate::num::element::{decode, encode};
use crate::op::step_values::LossScale;
use crate::op::{Op, Slot};
use crate::plan::{Param, Plan, ProgramKind, Stored};
use crate::shape::DType;

/// An engine in any of its states.
pub enum Session<B: Backend> {
    Warmup(Engine<B, Warmup>),
    Recorded(Engine<B, Recorded>),
    Captured(Engine<B, Captured<B>>),
    Replaying(Engine<B, Replaying<B>>),
}

macro_rules! each_state {
    ($session:expr, $engine:ident => $body:expr) => {
        match $session {
            Session::Warmup($engine) => $body,
            Session::Recorded($engine) => $body,
            Session::Captured($engine) => $body,
            Session::Replaying($engine) => $body,
        }
    };
}

impl<B: Backend> Session<B> {
    /// A session at its first step, with every parameter and moment zero.
    ///
    /// # Errors
    /// The arena does not fit, or the device fails.
    pub fn new(backend: B, plan: Arc<Plan>) -> Result<Self, DeviceError> {
        Ok(Session::Warmup(Engine::new(backend, plan)?))
    }

    /// Takes the next transition: record, capture or prove; a replaying session stays as it is.
    /// Whatever the outcome, the session it returns can be used.
    pub fn advance(self, batch: &Batch, hyper: &Hyper) -> (Self, Result<(), CaptureError>) {
        match self {
            Session::Warmup(engine) => settle(engine.record(), Session::Recorded, Session::Warmup),
            Session::Recorded(engine) => {
                settle(engine.capture(), Session::Captured, Session::Recorded)
            }
            Session::Captured(engine) => {
                let proven = engine.prove(batch, hyper);
                settle(proven, Session::Replaying, Session::Captured)
            }
            replaying @ Session::Replaying(_) => (replaying, Ok(())),
        }
    }

    /// Back to warm-up from any state; weights and counters stay.
    pub fn thaw(self) -> Self {
        match self {
            Session::Replaying(engine) => Session::Warmup(engine.thaw()),
            Session::Recorded(engine) => Session::Warmup(engine.restart()),
            Session::Captured(engine) => Session::Warmup(engine.restart()),
            warmup @ Session::Warmup(_) => warmup,
        }
    }

    /// One step, eager in warm-up and replayed once proven.
    ///
    /// # Errors
    /// [`StepError::NotSteppable`] between record and proof; else as the engine's.
    pub fn step(&mut self, batch: &Batch, hyper: &Hyper) -> Result<StepReport, StepError> {
        self.step_observed(batch, hyper, None)
    }

    /// One step; in warm-up the observer looks at the arena after every call. A replay runs as one
    /// graph and is not observed.
    ///
    /// # Errors
    /// As [`Session::step`].
    pub fn step_observed(
        &mut self,
        batch: &Batch,
        hyper: &Hyper,
        observer: Option<&mut dyn Observe<B>>,
    ) -> Result<StepReport, StepError> {
        match self {
            Session::Warmup(engine) => engine.step_observed(batch, hyper, observer),
            Session::Replaying(engine) => engine.step(batch, hyper),
            between => Err(not_steppable(between)),
        }
    }

    /// Checks that a batch and hyperparameters fit the program; changes nothing.
    ///
    /// # Errors
    /// What does not fit, or the first fault of a poisoned engine.
    pub fn check(&self, batch: &Batch, hyper: &Hyper) -> Result<(), StepError> {
        let core = self.core();
        core.validate_of(core.plan.config.batch, batch, hyper)?;
        Ok(())
    }

    /// One run of the evaluation.
    pub(super) fn evaluate_pass(
        &mut self,
        batch: &Batch,
        hyper: &Hyper,
    ) -> Result<Evaluation, StepError> {
        if let Session::Replaying(engine) = self {
            return engine.evaluate(batch, hyper);
        }
        self.evaluate_observed(batch, hyper, None)
    }

    /// The logits of a batch, `[batch · seq_len, vocab_size]`.
    ///
    /// # Errors
    /// A batch that does not fit; a device fault.
    pub fn logits(&mut self, batch: &Batch, hyper: &Hyper) -> Result<Vec<f32>, StepError> {
        self.logits_of(0..self.core().plan.inputs.rows(), batch, hyper)
    }

    /// The logits of some positions of a batch, counted row-major, `[positions, vocab_size]`.
    ///
    /// # Errors
    /// Positions beyond the batch, a batch that does not fit, a device fault.
    pub fn logits_of(
        &mut self,
        positions: Range<usize>,
        batch: &Batch,
        hyper: &Hyper,
    ) -> Result<Vec<f32>, StepError> {
        let plan = &self.core().plan;
        if positions.end > plan.inputs.rows() {
            return Err(StepError::TensorSize {
                name: "logits".to_owned(),
                expected: plan.inputs.rows(),
                found: positions.end,
            });
        }
        let mut reader = LogitsReader {
            chunks: plan.logits.clone(),
            vocab_size: plan.vocab_size,
            logits: vec![0.0; positions.len() * plan.vocab_size],
            positions,
        };
        self.evaluate_observed(batch, hyper, Some(&mut reader))?;
        Ok(reader.logits)
    }

    /// For each position of the last batch evaluated, whether its target had the greatest logit;
    /// `[batch · seq_len]`, false where nothing is scored.
    ///
    /// # Errors
    /// A device fault.
    pub fn row_hits(&mut self) -> Result<Vec<bool>, DeviceError> {
        let core = self.core_mut();
        let mut hits = vec![0u32; core.plan.inputs.rows()];
        let region = core.plan.layout.region(core.plan.outputs.row_hit);
        let bytes = bytemuck::cast_slice_mut(&mut hits);
        let read = core.backend.read(&core.arena, region, bytes);
        core.guarded(read)?;
        Ok(hits.into_iter().map(|hit| hit != 0).collect())
    }

    fn evaluate_observed(
        &mut self,
        batch: &Batch,
        hyper: &Hyper,
        observer: Option<&mut dyn Observe<B>>,
    ) -> Result<Evaluation, StepError> {
        let core = self.core_mut();
        let scalars = core.validate(batch, hyper)?;
        core.write_inputs(batch, scalars)?;
        core.eager(ProgramKind::Evaluate, observer)?;
        Ok(core.evaluation(batch)?)
    }

    /// Fills every parameter from a source. Moments keep their bits.
    ///
    /// # Errors
    /// The source's own error; [`StepError::TensorSize`] when it gives too many or too few values.
    pub fn load<S: ParamSource>(&mut self, source: &S) -> Result<(), LoadError<S::Error>> {
        let plan = self.core().plan.clone();
        for (index, param) in plan.params.iter().enumerate() {
            if param.stored == Stored::Maxima {
                continue;
            }
            if matches!(param.stored, Stored::Packed { .. })
                && let Some(packed) = source.packed(&plan, index).map_err(LoadError::Source)?
            {
                self.write_packed(param, &packed).map_err(LoadError::Step)?;
                continue;
            }
            let values = source.values(&plan, index).map_err(LoadError::Source)?;
            self.write_values(param, &values).map_err(LoadError::Step)?;
        }
        Ok(())
    }

    /// Overwrites one parameter.
    ///
    /// # Errors
    /// A name that no parameter has, a wrong number of values, a device fault.
    pub fn write_param(&mut self, name: &str, values: &[f32]) -> Result<(), StepError> {
        let param = self.param(name)?;
        self.write_values(&param, values)
    }

    /// Reads one parameter.
    ///
    /// # Errors
    /// A name that no parameter has, a device fault.
    pub fn read_param(&mut self, name: &str) -> Result<Vec<f32>, StepError> {
        let param = self.param(name)?;
        Ok(self.read_values(&param)?)
    }

    /// Reads the elements of a slot of floats, as f32; those of any other slot are none.
    ///
    /// # Errors
    /// A device fault.
    pub fn read_slot(&mut self, slot: Slot) -> Result<Vec<f32>, DeviceError> {
        let core = self.core_mut();
        let dtype = core.plan.slots.spec(slot).dtype;
        if dtype != DType::F32 {
            let bytes = self.read_bytes(slot)?;
            return Ok(decode(dtype, &bytes).unwrap_or_default());
        }
        let region = core.plan.layout.region(slot);
        let mut values = vec![0.0f32; region.bytes / 4];
        let bytes = bytemuck::cast_slice_mut(&mut values);
        let read = core.backend.read(&core.arena, region, bytes);
        core.guarded(read)?;
        Ok(values)
    }

    pub(super) fn write_slot(&mut self, slot: Slot, values: &[f32]) -> Result<(), StepError> {
        self.check_elements(slot, values.len())?;
        let core = self.core_mut();
        let narrow = match core.plan.slots.spec(slot).dtype {
            DType::F32 => None,
            dtype => encode(dtype, values),
        };
        let bytes = narrow.as_deref().unwrap_or(bytemuck::cast_slice(values));
        core.write_bytes(slot, bytes)?;
        if let Some((region, bytes)) = core.plan.shadow_of(slot, values) {
            let written = core.backend.write(&mut core.arena, region, &bytes);
            core.guarded(written)?;
        }
        Ok(())
    }

    /// The loss scale as the last step has left it; `None` where gradients carry none.
    ///
    /// # Errors
    /// A device fault.
    pub fn loss_scale(&mut self) -> Result<Option<LossScale>, DeviceError> {
        self.core_mut().read_loss_scale()
    }

    /// Overwrites the loss scale; changes nothing where gradients carry none.
    ///
    /// # Errors
    /// A device fault.
    pub fn set_loss_scale(&mut self, state: LossScale) -> Result<(), DeviceError> {
        let core = self.core_mut();
        match core.plan.inputs.loss_scale {
            None => Ok(()),
            Some(slot) => core.write_bytes(slot, bytemuck::bytes_of(&state)),
        }
    }

    fn param(&self, name: &str) -> Result<Param, StepError> {
        let params = &self.core().plan.params;
        if let Some(param) = params.iter().find(|p| p.name == name) {
            return Ok(param.clone());
        }
        let near = |p: &&Param| (strsim::jaro(name, &p.name) * 1e6) as u64;
        let nearest = params.iter().max_by_key(near).map(|p| p.name.clone());
        Err(StepError::UnknownTensor {
            name: name.to_owned(),
            nearest: nearest.unwrap_or_default(),
        })
    }

    /// The digest of every parameter, in parameter order; a replaying session launches the graph that
    /// was captured for it.
    ///
    /// # Errors
    /// A device fault; while replaying, a graph that is not one of these parameters any more.
    pub fn param_digests(&mut self) -> Result<Vec<blake3::Hash>, StepError> {
        match self {
            Session::Replaying(engine) => engine.param_digests(),
            eager => Ok(eager.core_mut().param_digests()?),
        }
    }

    /// The digests of any slots.
    ///
    /// # Errors
    /// A device fault.
    pub fn digests(&mut self, slots: &[Slot]) -> Result<Vec<blake3::Hash>, DeviceError> {
        self.core_mut().digests(slots)
    }

    /// The root over all parameters.
    ///
    /// # Errors
    /// As [`Session::param_digests`].
    pub fn root(&mut self) -> Result<blake3::Hash, StepError> {
        Ok(root(&self.param_digests()?))
    }

    /// Copies everything that survives a step.
    ///
    /// # Errors
    /// A device fault.
    pub fn snapshot(&mut self) -> Result<Snapshot, DeviceError> {
        self.core_mut().snapshot()
    }

    /// Goes back to a snapshot of a session over the same plan.
    ///
    /// # Errors
    /// A snapshot of another size; a device fault.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<(), DeviceError> {
        let core = self.core_mut();
        let layout = &core.plan.layout;
        let restored = snapshot.restore(&core.backend, &mut core.arena, layout);
        core.guarded(restored)?;
        core.progress = snapshot.progress;
        core.window.clone_from(&snapshot.window);
        core.half = Half::None;
        Ok(())
    }

    /// The plan the session runs.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.core().plan
    }

    /// The manifest of the step.
    pub fn manifest(&self) -> &Manifest {
        &self.core().manifest
    }

    /// How each call of the step is executed here.
    pub fn executions(&self) -> Vec<Execution> {
        self.core().executions()
    }

    /// How far the run is.
    pub fn progress(&self) -> Progress {
        self.core().progress
    }

    /// What the session runs on.
    pub fn device(&self) -> DeviceInfo {
        self.core().backend.info()
    }

    /// The name of the state.
    pub fn state_name(&self) -> &'static str {
        each_state!(self, engine => engine.state_name())
    }

    pub(super) fn core(&self) -> &Core<B> {
        each_state!(self, engine => &engine.core)
    }

    pub(super) fn core_mut(&mut self) -> &mut Core<B> {
        each_state!(self, engine => &mut engine.core)
    }
}

/// Parameters that could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError<E> {
    /// The source failed.
    #[error(transparent)]
    Source(E),
    /// The values do not fit, or the device failed.
    #[error(transparent)]
    Step(StepError),
}

/// The refusal of a state between record and proof.
pub(super) fn not_steppable<B: Backend>(session: &Session<B>) -> StepError {
    StepError::NotSteppable {
        state: session.state_name(),
    }
}

fn settle<B: Backend, S: State, T: State>(
    transition: Result<Engine<B, T>, Box<Refused<B, S>>>,
    next: impl FnOnce(Engine<B, T>) -> Session<B>,
    same: impl FnOnce(Engine<B, S>) -> Session<B>,
) -> (Session<B>, Result<(), CaptureError>) {
    match transition {
        Ok(engine) => (next(engine), Ok(())),
        Err(refused) => (same(refused.engine), Err(refused.reason)),
    }
}

/// Copies the logits of some positions while their chunk exists.
struct LogitsReader {
    chunks: Vec<(Slot, usize)>,
    vocab_size: usize,
    positions: Range<usize>,
    logits: Vec<f32>,
}

impl<B: Backend> Observe<B> for LogitsReader {
    fn after(
        &mut self,
        _index: usize,
        call: &PlacedCall,
        (backend, arena): (&B, &B::Arena),
    ) -> Result<(), DeviceError> {
        // Each chunk is the first product that writes the next logits slot.
        let next = self.chunks.first().copied();
        if let (Op::Matmul(op), Some((slot, start))) = (&call.call.op, next)
            && call.call.writes[0] == slot
        {
            self.chunks.remove(0);
            let wanted = &self.positions;
            let (from, to) = (wanted.start.max(start), wanted.end.min(start + op.rows));
            if from < to {
                let storage = op.math.storage();
                let row_bytes = self.vocab_size * storage.size();
                let region = Region {
                    offset: call.writes[0].offset + (from - start) * row_bytes,
                    bytes: (to - from) * row_bytes,
                };
                let first = (from - wanted.start) * self.vocab_size;
                let rows = &mut self.logits[first..first + (to - from) * self.vocab_size];
                let mut bytes = vec![0; region.bytes];
                backend.read(arena, region, &mut bytes)?;
                rows.copy_from_slice(&decode(storage, &bytes).unwrap_or_default());
            }
        }
        Ok(())
    }
}
