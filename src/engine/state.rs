//! The life cycle of an engine, and nothing else.
//!
//! ```text
//! Warmup --record--> Recorded --capture--> Captured --prove--> Replaying
//!    ^                                                             |
//!    +---------------------------- thaw ---------------------------+
//! ```
//!
//! The order is what makes a replay trustworthy. Calls are recorded before capture so that there is a
//! list to hold the graph against; a captured graph cannot step until a replay has given the bits of
//! the eager step; and only a proven graph has a guard, which every replay must pass. A transition
//! that is refused gives the engine back as it was, with the reason.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::guard::{Facts, Guard};
use super::hyper::Hyper;
use super::programs::{Graphs, RunPrograms};
use super::prove::prove_equal;
use super::root::RootGraph;
use super::step::{Core, Evaluation, Observe, Progress, StepReport};
use super::window::{Parts, check_closed};
use crate::backend::{Backend, Execution};
use crate::data::Batch;
use crate::error::{CaptureError, DeviceError, StepError};
use crate::manifest::Manifest;
use crate::op::OpCall;
use crate::plan::{Plan, ProgramKind};

/// Fewest eager steps before recording: two lists to compare.
pub const FEWEST_WARMUP_STEPS: u32 = 2;

mod sealed {
    pub trait EngineState {}
}

/// A state of the engine.
pub trait State: sealed::EngineState {
    /// The state's name in messages.
    const NAME: &'static str;
}

/// Steps eagerly and writes down what it calls.
#[derive(Debug, Default)]
pub struct Warmup {
    steps: u32,
    /// The calls that the last two runs of each program have issued, the older first.
    issued: BTreeMap<ProgramKind, [Vec<OpCall>; 2]>,
}

impl Warmup {
    /// Writes down what a run of a program has issued.
    pub(super) fn note(&mut self, kind: ProgramKind, issued: Vec<OpCall>) {
        // The first run stands for the one before it, so that a program that ran once is compared too.
        let runs = self
            .issued
            .entry(kind)
            .or_insert_with(|| [issued.clone(), issued.clone()]);
        runs.swap(0, 1);
        runs[1] = issued;
    }

    /// Counts a step that was taken.
    pub(super) fn count_step(&mut self) {
        self.steps += 1;
    }
}

/// The calls are known, equal over two steps, and equal to the plan.
#[derive(Debug)]
pub struct Recorded(());

/// Graphs exist, but nothing shows that they compute the step; they cannot be launched.
pub struct Captured<B: Backend> {
    graphs: Graphs<B>,
}

/// Graphs are proven; every step is a guarded replay.
pub struct Replaying<B: Backend> {
    pub(super) graphs: Graphs<B>,
    pub(super) guard: Guard,
    root: RootGraph<B>,
}

macro_rules! states {
    ($($state:ty: $name:literal $(, $bound:ident)?);+ $(;)?) => {$(
        impl $(<B: $bound>)? sealed::EngineState for $state {}
        impl $(<B: $bound>)? State for $state {
            const NAME: &'static str = $name;
        }
    )+};
}

states! {
    Warmup: "warm-up";
    Recorded: "recorded";
    Captured<B>: "captured", Backend;
    Replaying<B>: "replaying", Backend;
}

/// A training engine on backend `B` in state `S`.
pub struct Engine<B: Backend, S: State> {
    pub(super) core: Core<B>,
    pub(super) state: S,
}

/// A transition that did not happen: the engine as it was, and why.
pub struct Refused<B: Backend, S: State> {
    pub engine: Engine<B, S>,
    pub reason: CaptureError,
}

/// The result of a transition from `S` to `T`.
pub type Transition<B, S, T> = Result<Engine<B, T>, Box<Refused<B, S>>>;

impl<B: Backend, S: State> Engine<B, S> {
    /// The plan the engine runs.
    pub fn plan(&self) -> &Plan {
        &self.core.plan
    }

    /// The manifest of the step.
    pub fn manifest(&self) -> &Manifest {
        &self.core.manifest
    }

    /// How far the run is.
    pub fn progress(&self) -> Progress {
        self.core.progress
    }

    /// How each call of the step is executed here.
    pub fn executions(&self) -> Vec<Execution> {
        self.core.executions()
    }

    /// The name of the state.
    pub fn state_name(&self) -> &'static str {
        S::NAME
    }

    fn with_state<T: State>(self, state: T) -> Engine<B, T> {
        Engine {
            core: self.core,
            state,
        }
    }

    /// Gives up whatever was recorded or captured; warm-up starts again, the weights stay.
    pub(super) fn restart(self) -> Engine<B, Warmup> {
        self.with_state(Warmup::default())
    }

    fn refuse<T: State>(self, reason: CaptureError) -> Transition<B, S, T> {
        Err(Box::new(Refused {
            engine: self,
            reason,
        }))
    }
}

impl<B: Backend> Engine<B, Warmup> {
    /// An engine at its first step, with every parameter and moment zero.
    ///
    /// # Errors
    /// The arena does not fit, or the device fails.
    pub fn new(backend: B, plan: Arc<Plan>) -> Result<Self, DeviceError> {
        Ok(Engine {
            core: Core::new(backend, plan)?,
            state: Warmup::default(),
        })
    }

    /// One eager step.
    ///
    /// # Errors
    /// A batch or hyperparameter that does not fit changes nothing; a device fault poisons.
    pub fn step(&mut self, batch: &Batch, hyper: &Hyper) -> Result<StepReport, StepError> {
        self.step_observed(batch, hyper, None)
    }

    /// One eager step with a look at the arena after every call.
    ///
    /// # Errors
    /// As [`Engine::step`]; a fault while looking counts as the device's.
    pub fn step_observed(
        &mut self,
        batch: &Batch,
        hyper: &Hyper,
        observer: Option<&mut dyn Observe<B>>,
    ) -> Result<StepReport, StepError> {
        whole_step(self, (batch, hyper), observer)
    }

    /// The next pass over a batch that the plan splits; the report of the step when it was the last.
    ///
    /// # Errors
    /// As [`Engine::step`].
    pub fn pass(&mut self, batch: &Batch, hyper: &Hyper) -> Result<Option<StepReport>, StepError> {
        one_pass(self, batch, hyper)
    }

    /// Eager steps taken in this state.
    pub fn warmup_steps(&self) -> u32 {
        self.state.steps
    }

    /// Ends warm-up: the last two steps must have issued the same calls, and those of the plan.
    ///
    /// # Errors
    /// Too few steps, or the first call that differs.
    pub fn record(self) -> Transition<B, Warmup, Recorded> {
        if self.state.steps < FEWEST_WARMUP_STEPS {
            let (expected, found) = (FEWEST_WARMUP_STEPS, self.state.steps);
            return self.refuse(CaptureError::TooFewWarmupSteps { expected, found });
        }
        for (kind, [older, newer]) in &self.state.issued {
            let planned = self.core.plan.calls(*kind);
            let differs = |expected, found| first_difference(expected, found);
            let reason = match (differs(older, newer), differs(planned, newer)) {
                (Some((call, expected, found)), _) => CaptureError::Unstable {
                    call,
                    expected,
                    found,
                },
                (None, Some((call, expected, found))) => CaptureError::NotThePlan {
                    call,
                    expected,
                    found,
                },
                (None, None) => continue,
            };
            return self.refuse(reason);
        }
        Ok(self.with_state(Recorded(())))
    }
}

impl<B: Backend> Engine<B, Recorded> {
    /// Captures every program as a graph, without running it.
    ///
    /// # Errors
    /// What the backend cannot capture.
    pub fn capture(mut self) -> Transition<B, Recorded, Captured<B>> {
        match Graphs::capture(&mut self.core) {
            Ok(graphs) => Ok(self.with_state(Captured { graphs })),
            Err(reason) => self.refuse(reason),
        }
    }
}

impl<B: Backend> Engine<B, Captured<B>> {
    /// Proves the graphs on a batch: an eager step and a replay from the same bits must give the same
    /// bits. Then the digest of the parameters is captured as a graph of its own. Whatever the outcome, the arena is back at the bits before the proof.
    ///
    /// # Errors
    /// The first tensor that differs, a proof step that was dropped, or a device fault.
    pub fn prove(
        mut self,
        batch: &Batch,
        hyper: &Hyper,
    ) -> Transition<B, Captured<B>, Replaying<B>> {
        let proven = prove_equal(&mut self.core, &mut self.state.graphs, batch, hyper);
        match proven.and_then(|()| RootGraph::capture(&mut self.core)) {
            Err(reason) => self.refuse(reason),
            Ok(root) => {
                let core = self.core;
                let arena = core.backend.arena_id(&core.arena);
                let layout = &core.plan.layout;
                let facts = Facts::gather(arena, layout, core.manifest.hash(), hyper);
                let state = Replaying {
                    graphs: self.state.graphs,
                    guard: Guard::new(facts),
                    root,
                };
                Ok(Engine { core, state })
            }
        }
    }
}

impl<B: Backend> Engine<B, Replaying<B>> {
    /// One replayed step.
    ///
    /// # Errors
    /// A batch or hyperparameter that does not fit, or a guard that does not admit the replay,
    /// changes nothing; a device fault poisons.
    pub fn step(&mut self, batch: &Batch, hyper: &Hyper) -> Result<StepReport, StepError> {
        whole_step(self, (batch, hyper), None)
    }

    /// The next pass over a batch that the plan splits; the report of the step when it was the last.
    ///
    /// # Errors
    /// As [`Engine::step`].
    pub fn pass(&mut self, batch: &Batch, hyper: &Hyper) -> Result<Option<StepReport>, StepError> {
        one_pass(self, batch, hyper)
    }

    /// The loss of a batch by the captured evaluation; changes nothing that survives. In a plan that computes a batch
    /// in passes this is one pass, whose loss is the sum that [`Session::evaluate`](super::session::Session::evaluate)
    /// combines and divides.
    ///
    /// # Errors
    /// As [`Engine::step`].
    pub fn evaluate(&mut self, batch: &Batch, hyper: &Hyper) -> Result<Evaluation, StepError> {
        let scalars = self.core.validate(batch, hyper)?;
        self.admit_all(&[ProgramKind::Evaluate], hyper)?;
        self.core.write_inputs(batch, scalars)?;
        self.run_program(ProgramKind::Evaluate, hyper, None)?;
        Ok(self.core.evaluation(batch)?)
    }

    /// The digest of every parameter, in parameter order, by its captured graph.
    ///
    /// # Errors
    /// A graph that is not one of these parameters any more; a device fault.
    pub fn param_digests(&mut self) -> Result<Vec<blake3::Hash>, StepError> {
        self.state.root.digests(&mut self.core)
    }

    /// Gives up the graphs; warm-up starts again, the weights stay.
    pub fn thaw(self) -> Engine<B, Warmup> {
        self.restart()
    }
}

/// One step over a whole batch: by its program, or in the passes that the plan splits it into.
fn whole_step<B: Backend, E: RunPrograms<B>>(
    engine: &mut E,
    (batch, hyper): (&Batch, &Hyper),
    observer: Option<&mut dyn Observe<B>>,
) -> Result<StepReport, StepError> {
    if engine.core().plan.config.is_split() {
        let parts = Parts::of(engine, batch, hyper)?;
        return parts.step(engine, hyper, observer);
    }
    let core = engine.core();
    let scalars = core.validate(batch, hyper)?;
    check_closed(core.window.as_ref())?;
    engine.admit_all(&[ProgramKind::Step], hyper)?;
    engine.core().write_inputs(batch, scalars)?;
    engine.core().clear_loss()?;
    engine.run_program(ProgramKind::Step, hyper, observer)?;
    let report = engine.core().commit(batch.active_targets(), hyper)?;
    engine.count_step();
    Ok(report)
}

/// One pass over a batch; the whole step where the plan does not split it.
fn one_pass<B: Backend, E: RunPrograms<B>>(
    engine: &mut E,
    batch: &Batch,
    hyper: &Hyper,
) -> Result<Option<StepReport>, StepError> {
    if !engine.core().plan.config.is_split() {
        return whole_step(engine, (batch, hyper), None).map(Some);
    }
    let parts = Parts::of(engine, batch, hyper)?;
    parts.pass(engine, hyper, None)
}

fn first_difference(expected: &[OpCall], found: &[OpCall]) -> Option<(usize, String, String)> {
    let longest = expected.len().max(found.len());
    let call = (0..longest).find(|&i| expected.get(i) != found.get(i))?;
    let text = |calls: &[OpCall]| {
        let end = || format!("the end after {} calls", calls.len());
        calls.get(call).map_or_else(end, |c| c.op.to_string())
    };
    Some((call, text(expected), text(found)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::CpuBackend;
    use crate::cpu::context::CpuContext;
    use crate::cpu::simd::SimdPath;
    use crate::model::decoder::Decoder;
    use crate::model::{Family, ModelConfig};
    use crate::op::Op;
    use crate::op::tree_add::TreeAdd;
    use crate::plan::PlanConfig;

    fn warm() -> Engine<CpuBackend, Warmup> {
        let model = Decoder::new(ModelConfig {
            family: Family::Llama,
            vocab_size: 8,
            d_model: 8,
            n_layers: 1,
            n_heads: 2,
            n_kv_heads: 1,
            head_dim: 4,
            d_ff: 8,
            rope_theta: 1e4,
            rms_norm_eps: 1e-5,
            tie_embeddings: false,
            max_seq_len: 4,
            init_std: 0.1,
        });
        let plan = Arc::new(Plan::build(&model, PlanConfig::of(1, 4)).unwrap());
        let cpu = CpuBackend::new(CpuContext::new(SimdPath::detect(), 1).unwrap());
        let mut engine = Engine::new(cpu, plan).unwrap();
        let batch = Batch {
            batch: 1,
            seq_len: 4,
            input_ids: vec![1, 2, 3, 4],
            targets: vec![2, 3, 4, 5],
            weights: vec![1.0; 4],
            normaliser: None,
        };
        for _ in 0..2 {
            engine.step(&batch, &Hyper::default()).unwrap();
        }
        engine
    }

    fn runs(engine: &mut Engine<CpuBackend, Warmup>) -> &mut [Vec<OpCall>; 2] {
        let runs = engine.state.issued.get_mut(&ProgramKind::Step);
        runs.expect("the step ran")
    }

    #[test]
    fn two_steps_that_call_differently_are_not_recorded() {
        let mut engine = warm();
        runs(&mut engine)[1][4].op = Op::TreeAdd(TreeAdd { elements: 1 });
        let refused = engine.record().err().expect("unstable");
        let CaptureError::Unstable { call: 4, found, .. } = refused.reason else {
            panic!("expected an unstable record, found {}", refused.reason);
        };
        assert_eq!(found, "tree_add{elements=1}");
        let mut engine = refused.engine;
        runs(&mut engine)[1].truncate(4);
        let refused = engine.record().err().expect("unstable");
        assert!(refused.reason.to_string().contains("the end after 4 calls"));
    }

    #[test]
    fn steps_that_leave_the_plan_are_not_recorded() {
        let mut engine = warm();
        for issued in runs(&mut engine) {
            issued.swap(0, 1);
        }
        let refused = engine.record().err().expect("not the plan");
        assert!(matches!(
            refused.reason,
            CaptureError::NotThePlan { call: 0, .. }
        ));
    }
}
