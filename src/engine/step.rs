//! One step: validate, write, launch, report, commit. Counters move only at commit, so a step that
//! fails leaves nothing half-moved.

use std::borrow::Cow;
use std::sync::Arc;

use super::guard::Admitted;
use super::hyper::Hyper;
use super::inputs::InputImage;
use super::snapshot::Snapshot;
use super::window::Window;
use crate::backend::{Backend, Execution};
use crate::data::Batch;
use crate::error::{DeviceError, GuardError, StepError};
use crate::layout::{PlacedCall, Region};
use crate::manifest::Manifest;
use crate::op::step_values::{Dropped, LossScale, ReportWords, StepScalars};
use crate::op::{OpCall, Slot};
use crate::plan::{Plan, ProgramKind};

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// The number of the step, from 0.
    pub step: u64,
    /// The loss over the batch, before the update.
    pub loss: f32,
    /// The global gradient norm before clipping.
    pub grad_norm: f32,
    /// What gradients were multiplied by.
    pub clip_coefficient: f32,
    /// Why the step was dropped whole; empty when it was applied.
    pub dropped: Dropped,
    /// The learning rate used.
    pub lr: f64,
    /// Targets that were scored.
    pub scored: usize,
}

impl StepReport {
    /// Whether weights and moments were updated.
    pub fn applied(&self) -> bool {
        self.dropped.is_empty()
    }
}

/// What an evaluation of one batch found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// The mean loss over the scored targets.
    pub loss: f32,
    /// Scored targets whose logit is the row's maximum.
    pub hits: usize,
    /// Targets that were scored.
    pub scored: usize,
}

/// How far a run is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Steps taken: the data cursor and the schedule follow it.
    pub taken: u64,
    /// Steps applied: AdamW's `t`.
    pub applied: u64,
}

/// What the forward half has left.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Half {
    /// Nothing: backward has nothing to start from.
    None,
    /// Activations, and an output that waits for its gradient.
    Forward,
}

/// Looks at the arena after each eager call.
pub trait Observe<B: Backend> {
    /// Called after call `index` of a program has run.
    ///
    /// # Errors
    /// A fault of the device while looking; the step fails with it.
    fn after(
        &mut self,
        index: usize,
        call: &PlacedCall,
        arena: (&B, &B::Arena),
    ) -> Result<(), DeviceError>;
}

/// What every state of the engine has.
pub struct Core<B: Backend> {
    pub(super) backend: B,
    pub(super) plan: Arc<Plan>,
    pub(super) manifest: Manifest,
    pub(super) arena: B::Arena,
    inputs: InputImage,
    /// The placed calls of every program.
    pub(super) programs: Vec<(ProgramKind, Vec<PlacedCall>)>,
    pub(super) progress: Progress,
    /// The accumulated passes that no update has taken in yet.
    pub(super) window: Option<Window>,
    /// Whether forward has left something that backward can start from.
    pub(super) half: Half,
    /// The first fault of the device; nothing runs after it.
    pub(super) poison: Option<String>,
}

impl<B: Backend> Core<B> {
    pub(super) fn new(backend: B, plan: Arc<Plan>) -> Result<Self, DeviceError> {
        let programs = plan.programs().iter();
        let programs: Vec<_> = programs
            .map(|(kind, calls)| (kind, plan.layout.place(calls)))
            .collect();
        let all: Vec<PlacedCall> = programs.iter().flat_map(|(_, c)| c.clone()).collect();
        let mut arena = backend.allocate(&plan.layout, &all)?;
        for (slot, values) in &plan.derived {
            let region = plan.layout.region(*slot);
            backend.write(&mut arena, region, bytemuck::cast_slice(values))?;
        }
        if let Some(slot) = plan.inputs.loss_scale {
            let region = plan.layout.region(slot);
            backend.write(&mut arena, region, bytemuck::bytes_of(&LossScale::INITIAL))?;
        }
        Ok(Core {
            manifest: plan.manifest(),
            inputs: InputImage::of(&plan.layout, input_slots(&plan)),
            programs,
            progress: Progress::default(),
            window: None,
            half: Half::None,
            poison: None,
            backend,
            plan,
            arena,
        })
    }

    /// The placed calls of a program; none where the plan has no such program.
    pub(super) fn calls(&self, kind: ProgramKind) -> &[PlacedCall] {
        let found = self.programs.iter().find(|(k, _)| *k == kind);
        found.map_or(&[], |(_, calls)| calls)
    }

    /// Refuses everything after a fault.
    pub(super) fn healthy(&self) -> Result<(), DeviceError> {
        match &self.poison {
            None => Ok(()),
            Some(first) => Err(DeviceError::Poisoned {
                first: first.clone(),
            }),
        }
    }

    /// Keeps the first fault and passes it on.
    pub(super) fn guarded<T>(&mut self, result: Result<T, DeviceError>) -> Result<T, DeviceError> {
        if let Err(fault) = &result
            && self.poison.is_none()
        {
            self.poison = Some(fault.to_string());
        }
        result
    }

    /// Checks batch and hyperparameters and gives the scalars of the next step; changes nothing.
    pub(super) fn validate(&self, batch: &Batch, hyper: &Hyper) -> Result<StepScalars, StepError> {
        let inputs = &self.plan.inputs;
        self.validate_of(inputs.batch, batch, hyper)
    }

    /// What the first pass over a batch computes; a batch of another size as it is, to be refused.
    pub(super) fn first_pass(&self, batch: &Batch) -> Result<Batch, StepError> {
        let (whole, pass) = (self.plan.config.batch, self.plan.inputs.batch);
        if whole == pass || batch.batch != whole {
            return Ok(batch.clone());
        }
        let seq_len = self.plan.inputs.seq_len;
        batch.validate(whole, seq_len, self.plan.vocab_size)?;
        Ok(batch.sequences(0..pass))
    }

    /// As [`Core::validate`], for a batch of so many sequences.
    pub(super) fn validate_of(
        &self,
        sequences: usize,
        batch: &Batch,
        hyper: &Hyper,
    ) -> Result<StepScalars, StepError> {
        self.healthy()?;
        let seq_len = self.plan.inputs.seq_len;
        batch.validate(sequences, seq_len, self.plan.vocab_size)?;
        self.check_baked(hyper)?;
        hyper.scalars(self.progress.applied + 1, batch.normaliser())
    }

    pub(super) fn check_baked(&self, hyper: &Hyper) -> Result<(), GuardError> {
        let config = &self.plan.config;
        let baked = [
            ("beta1", config.beta1, hyper.beta1),
            ("beta2", config.beta2, hyper.beta2),
            ("eps", config.eps, hyper.eps),
        ];
        match baked
            .into_iter()
            .find(|(_, a, b)| a.to_bits() != b.to_bits())
        {
            None => Ok(()),
            Some((name, expected, found)) => Err(GuardError::Baked {
                name,
                expected: expected.to_string(),
                found: found.to_string(),
            }),
        }
    }

    /// Writes batch and scalars into the arena.
    pub(super) fn write_inputs(
        &mut self,
        batch: &Batch,
        scalars: StepScalars,
    ) -> Result<(), DeviceError> {
        self.inputs.set(batch, &scalars)?;
        let mut stretches = self.inputs.stretches();
        let written = stretches
            .try_for_each(|(region, bytes)| self.backend.write(&mut self.arena, region, bytes));
        drop(stretches);
        self.guarded(written)
    }

    /// Writes the scalars of a step alone, where its batch stands in the arena already.
    pub(super) fn write_scalars(&mut self, scalars: StepScalars) -> Result<(), DeviceError> {
        self.write_bytes(self.plan.inputs.scalars, bytemuck::bytes_of(&scalars))
    }

    /// Writes the bytes of a slot.
    pub(super) fn write_bytes(&mut self, slot: Slot, bytes: &[u8]) -> Result<(), DeviceError> {
        let region = self.plan.layout.region(slot);
        let written = self.backend.write(&mut self.arena, region, bytes);
        self.guarded(written)
    }

    /// Sets the loss of a backbone alone to zero: its step leaves none, but an update of its halves does.
    pub(super) fn clear_loss(&mut self) -> Result<(), DeviceError> {
        match self.plan.backbone {
            None => Ok(()),
            Some(_) => self.write_bytes(self.plan.outputs.loss, &0.0f32.to_le_bytes()),
        }
    }

    /// The loss scale as the last update has left it; `None` where gradients carry none.
    pub(super) fn read_loss_scale(&mut self) -> Result<Option<LossScale>, DeviceError> {
        let Some(slot) = self.plan.inputs.loss_scale else {
            return Ok(None);
        };
        let mut state = LossScale::INITIAL;
        let region = self.plan.layout.region(slot);
        let bytes = bytemuck::bytes_of_mut(&mut state);
        let read = self.backend.read(&self.arena, region, bytes);
        self.guarded(read)?;
        Ok(Some(state))
    }

    /// A gradient of the caller's with the loss scale, where gradients carry one. The scale is a power of two:
    /// scaling before the gradient is rounded to its storage changes no digit.
    pub(super) fn scaled<'g>(&mut self, grad: &'g [f32]) -> Result<Cow<'g, [f32]>, DeviceError> {
        Ok(match self.read_loss_scale()? {
            Some(state) => grad.iter().map(|g| g * state.scale).collect(),
            None => Cow::Borrowed(grad),
        })
    }

    /// How each call of a step is executed here: of its program, or of a pass and the update.
    pub(super) fn executions(&self) -> Vec<Execution> {
        let step = match self.plan.config.is_split() {
            true => [
                self.calls(ProgramKind::Accumulate),
                self.calls(ProgramKind::Apply),
            ]
            .concat(),
            false => self.calls(ProgramKind::Step).to_vec(),
        };
        self.backend.executions(&step)
    }

    /// Runs a program call by call; returns the calls it issued.
    pub(super) fn eager(
        &mut self,
        kind: ProgramKind,
        mut observer: Option<&mut dyn Observe<B>>,
    ) -> Result<Vec<OpCall>, DeviceError> {
        // Any program may write where forward has left its activations.
        self.half = Half::None;
        let found = self.programs.iter().find(|(k, _)| *k == kind);
        let calls: &[PlacedCall] = found.map_or(&[], |(_, calls)| calls);
        let mut issued = Vec::with_capacity(calls.len());
        let mut fault = Ok(());
        for (index, call) in calls.iter().enumerate() {
            fault = self.backend.launch(&mut self.arena, call);
            issued.push(call.call.clone());
            if let (Ok(()), Some(observer)) = (&fault, observer.as_deref_mut()) {
                fault = observer.after(index, call, (&self.backend, &self.arena));
            }
            if fault.is_err() {
                break;
            }
        }
        self.guarded(fault)?;
        Ok(issued)
    }

    /// Launches a graph; the token shows that the guard has admitted it.
    pub(super) fn replay(
        &mut self,
        graph: &mut B::Graph,
        _admitted: Admitted<'_>,
    ) -> Result<(), DeviceError> {
        self.half = Half::None;
        let launched = self.backend.launch_graph(&mut self.arena, graph);
        self.guarded(launched)
    }

    /// Reads the report of the step that has just run.
    pub(super) fn report(&mut self) -> Result<ReportWords, DeviceError> {
        let mut words: ReportWords = bytemuck::Zeroable::zeroed();
        let region = self.plan.layout.region(self.plan.outputs.report);
        let read = self
            .backend
            .read(&self.arena, region, bytemuck::bytes_of_mut(&mut words));
        self.guarded(read)?;
        Ok(words)
    }

    /// Moves the counters of a step that has run and says what it did.
    pub(super) fn commit(
        &mut self,
        scored: usize,
        hyper: &Hyper,
    ) -> Result<StepReport, DeviceError> {
        let words = self.report()?;
        let report = StepReport {
            step: self.progress.taken,
            loss: f32::from_bits(words.loss),
            grad_norm: f32::from_bits(words.grad_norm),
            clip_coefficient: f32::from_bits(words.clip_coefficient),
            dropped: Dropped::from_bits_retain(words.dropped),
            lr: hyper.lr,
            scored,
        };
        self.window = None;
        self.progress.taken += 1;
        self.progress.applied += u64::from(words.applied);
        Ok(report)
    }

    /// Reads what an evaluation has left.
    pub(super) fn evaluation(&mut self, batch: &Batch) -> Result<Evaluation, DeviceError> {
        let outputs = self.plan.outputs;
        let mut loss = [0.0f32];
        let mut hits = vec![0u32; self.plan.inputs.rows()];
        let loss_region = self.plan.layout.region(outputs.loss);
        let hit_region = self.plan.layout.region(outputs.row_hit);
        let read = self
            .backend
            .read(
                &self.arena,
                loss_region,
                bytemuck::cast_slice_mut(&mut loss),
            )
            .and_then(|()| {
                let hits = bytemuck::cast_slice_mut(&mut hits);
                self.backend.read(&self.arena, hit_region, hits)
            });
        self.guarded(read)?;
        Ok(Evaluation {
            loss: loss[0],
            hits: hits.iter().map(|&h| h as usize).sum(),
            scored: batch.active_targets(),
        })
    }

    /// Copies everything that survives a step.
    pub(super) fn snapshot(&mut self) -> Result<Snapshot, DeviceError> {
        let layout = &self.plan.layout;
        let counters = (self.progress, self.window.clone());
        let taken = Snapshot::take(&self.backend, &self.arena, layout, counters);
        self.guarded(taken)
    }

    /// The digest of every trained and frozen parameter, in parameter order.
    pub(super) fn param_digests(&mut self) -> Result<Vec<blake3::Hash>, DeviceError> {
        let slots: Vec<Slot> = self.plan.params.iter().map(|p| p.slot).collect();
        self.digests(&slots)
    }

    /// The digests of any slots.
    pub(super) fn digests(&mut self, slots: &[Slot]) -> Result<Vec<blake3::Hash>, DeviceError> {
        let regions: Vec<_> = slots.iter().map(|&s| self.plan.layout.region(s)).collect();
        self.digest_regions(&regions)
    }

    /// The digests of any regions.
    pub(super) fn digest_regions(
        &mut self,
        regions: &[Region],
    ) -> Result<Vec<blake3::Hash>, DeviceError> {
        let digests = self.backend.digest(&self.arena, regions);
        self.guarded(digests)
    }
}

fn input_slots(plan: &Plan) -> [Slot; 4] {
    let inputs = &plan.inputs;
    [inputs.ids, inputs.targets, inputs.weights, inputs.scalars]
}

/// The root over parameters: BLAKE3 of their digests in parameter order.
pub fn root(digests: &[blake3::Hash]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for digest in digests {
        hasher.update(digest.as_bytes());
    }
    hasher.finalize()
}
