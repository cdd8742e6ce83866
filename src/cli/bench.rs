//! `bitstep bench`.
//!
//! Times hold for the machine and the moment. The step is timed alone: batches are made before the
//! clock starts. A step's time is the caller's, from the batch to the report that was read; a device
//! with a clock of its own also times its graph and its ops.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;

use super::Outcome;
use super::bench_report::{Digested, Measured, OnDevice};
use super::bench_stage::Stage;
use super::device::DeviceArguments;
use super::form::FormArguments;
use super::roofline::Limits;
use crate::any_device::AnyDevice;
use crate::backend::{ArenaId, Backend};
use crate::data::Batch;
use crate::engine::guard::{Facts, Guard};
use crate::engine::run::{Run, backbone_plan_of, plan_of};
use crate::engine::snapshot::Snapshot;
use crate::engine::step::Observe;
use crate::error::{DeviceError, Error, ExitCode, StepError};
use crate::io::Recipe;
use crate::layout::{Layout, PlacedCall};
use crate::num::normal::fill_normal;
use crate::num::philox::{Philox, Purpose};
use crate::plan::{Plan, ProgramKind};
use crate::program::SlotTable;

/// Repetitions of what takes microseconds.
const REPEATS: usize = 200;
/// Digests timed; the best counts.
const DIGESTS: usize = 5;

/// Arguments of `bitstep bench`.
#[derive(Args, Debug)]
pub struct Bench {
    /// The recipe, a TOML file
    recipe: PathBuf,
    /// Timed steps of each kind, eager and replayed
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..), value_name = "N")]
    steps: u32,
    /// Time the layers alone: features in and out, the gradient of what comes out given; Mamba alone
    #[arg(long)]
    backbone: bool,
    #[command(flatten)]
    warmth: Warmth,
    #[command(flatten)]
    device: DeviceArguments,
    #[command(flatten)]
    form: FormArguments,
    /// Also give each op's time, bytes and arithmetic, and its share of the device's limit
    #[arg(long)]
    profile: bool,
    /// Print one line of JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// What a device does before the steps of a kind are timed: its clock depends on its temperature and on the power of the last second.
#[derive(Args, Clone, Copy, Debug)]
struct Warmth {
    /// Seconds without work before the steps of each kind
    #[arg(long, default_value_t = 0, value_name = "SECONDS")]
    rest: u32,
    /// Seconds of untimed steps before the steps of each kind
    #[arg(long, default_value_t = 0, value_name = "SECONDS")]
    preheat: u32,
}

impl Warmth {
    /// Rests, then takes untimed steps.
    fn prepare(self, mut step: impl FnMut() -> Result<(), Error>) -> Result<(), Error> {
        std::thread::sleep(Duration::from_secs(self.rest.into()));
        let clock = Instant::now();
        while clock.elapsed() < Duration::from_secs(self.preheat.into()) {
            step()?;
        }
        Ok(())
    }
}

impl Bench {
    /// Measures; `start` is the start of the process.
    pub fn run(self, start: Instant) -> Outcome {
        let recipe = self.form.apply(Recipe::from_path(&self.recipe)?)?;
        let recipe = super::form::in_one_pass(recipe);
        let backend = self.device.open()?;
        let plan = match self.backbone {
            true => backbone_plan_of(&recipe)?,
            false => plan_of(&recipe)?,
        };
        let mut run = super::memory::open_reported(recipe, plan, &backend)?;
        if self.backbone {
            write_features(&mut run)?;
        }
        let measured = self.measure(run, &backend, start)?;
        match self.json {
            true => say!("{}", measured.json()),
            false => measured.print(),
        }
        Ok(ExitCode::Done)
    }

    fn measure(
        &self,
        mut run: Run<AnyDevice>,
        backend: &AnyDevice,
        start: Instant,
    ) -> Result<Measured, Error> {
        // Warm-up, capture and proof, as a training run has them, up to the first replay.
        for _ in 0..=run.recipe.warmup_steps {
            let batch = next_batch(&run)?;
            run.trainer.step(&batch)?;
        }
        let first_replay_ms = milliseconds(start);
        let replayed_ms = self.times(|| {
            let batch = next_batch(&run)?;
            let clock = Instant::now();
            run.trainer.step(&batch)?;
            Ok(milliseconds(clock))
        })?;
        let guard_us = guard_microseconds(&mut run, backend)?;
        let digested = digested(&mut run)?;
        let eager_ms = self.eager_ms(&mut run)?;
        let plan = run.trainer.session().plan().clone();
        let manifest = run.trainer.session().manifest().hash();
        let calls = plan.layout.place(plan.calls(ProgramKind::Step));
        let (mut call_ms, mut on_device) = (None, None);
        let (recipe, warmup_steps) = (run.recipe.name.clone(), run.recipe.warmup_steps);
        if backend.has_clock() {
            let state = run.trainer.session_mut().snapshot()?;
            // The run's arena is given back first: two of them may not fit.
            drop(run);
            let (times, found) = self.on_device(backend, plan.clone(), state)?;
            (call_ms, on_device) = (times, Some(found));
        } else if self.profile {
            call_ms = Some(self.call_ms(&mut run, calls.len())?);
        }
        let (flop, flop_source) = backend.peak(plan.config.math);
        let limits = Limits {
            flop,
            flop_source,
            bytes: backend.copy_bandwidth()?,
        };
        Ok(Measured {
            recipe,
            warmup_steps,
            backend: backend.clone(),
            plan,
            manifest,
            calls,
            replayed_ms,
            eager_ms,
            first_replay_ms,
            guard_us,
            digested,
            on_device,
            limits,
            call_ms,
        })
    }

    /// Milliseconds of each of the timed eager steps.
    fn eager_ms(&self, run: &mut Run<AnyDevice>) -> Result<Vec<f64>, Error> {
        run.trainer.thaw();
        let hyper = *run.trainer.hyper_mut();
        self.times(|| {
            let batch = next_batch(run)?;
            let clock = Instant::now();
            run.trainer.session_mut().step(&batch, &hyper)?;
            Ok(milliseconds(clock))
        })
    }

    /// The milliseconds that each of the timed steps of a kind gives, after what the device does before them.
    fn times(&self, mut step: impl FnMut() -> Result<f64, Error>) -> Result<Vec<f64>, Error> {
        self.warmth.prepare(|| step().map(drop))?;
        (0..self.steps).map(|_| step()).collect()
    }

    /// Milliseconds of each call of an eager step, by the caller's clock: right where a call has ended
    /// when its launch returns, as on the CPU.
    fn call_ms(&self, run: &mut Run<AnyDevice>, calls: usize) -> Result<Vec<f64>, Error> {
        let hyper = *run.trainer.hyper_mut();
        let mut clock = CallClock {
            last: Instant::now(),
            ms: vec![0.0; calls],
        };
        for _ in 0..self.steps {
            let batch = next_batch(run)?;
            clock.last = Instant::now();
            let session = run.trainer.session_mut();
            session.step_observed(&batch, &hyper, Some(&mut clock))?;
        }
        let steps = f64::from(self.steps);
        Ok(clock.ms.iter().map(|ms| ms / steps).collect())
    }

    /// What the device's own clock says of the step's graph and, for a profile, of each call.
    fn on_device(
        &self,
        backend: &AnyDevice,
        plan: Arc<Plan>,
        state: Snapshot,
    ) -> Result<(Option<Vec<f64>>, OnDevice), Error> {
        let mut stage = Stage::new(backend, plan, state)?;
        self.warmth.prepare(|| stage.step_ms(1).map(drop))?;
        let found = OnDevice {
            graph_ms: stage.step_ms(self.steps)?,
            nodes: stage.nodes(),
            memory: stage.memory(),
        };
        let times = match self.profile {
            true => stage.call_ms()?,
            false => None,
        };
        Ok((times, found))
    }
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

fn next_batch(run: &Run<AnyDevice>) -> Result<Batch, Error> {
    let session = run.trainer.session();
    match session.plan().backbone {
        Some(_) => Ok(session.no_tokens()),
        None => Ok(run.loader.batch_at(session.progress().taken)?),
    }
}

/// Normally distributed features and gradients, those of a loss that is the mean of its elements.
fn write_features(run: &mut Run<AnyDevice>) -> Result<(), Error> {
    let (seed, width) = (run.recipe.seed, run.recipe.model_config()?.d_model());
    let session = run.trainer.session_mut();
    let elements = session.plan().tokens() * width;
    let [mut features, mut gradient] = [0, 0].map(|_| vec![0.0; elements]);
    // Streams that no parameter has.
    let numbers = |stream| Philox::new(seed, Purpose::Init, stream);
    fill_normal(&mut features, numbers(u32::MAX), 1.0);
    fill_normal(&mut gradient, numbers(u32::MAX - 1), 1.0 / elements as f32);
    Ok(session.write_features(&features, &gradient)?)
}

/// What the checks before a replay cost: the graph's own and the guard's, over this run's slots.
fn guard_microseconds(run: &mut Run<AnyDevice>, backend: &AnyDevice) -> Result<f64, Error> {
    let hyper = *run.trainer.hyper_mut();
    let session = run.trainer.session();
    let (layout, manifest) = (&session.plan().layout, session.manifest().hash());
    // The cost does not depend on the arena's size, so the graph checked is one without calls.
    let mut arena = backend.allocate(&Layout::plan(&SlotTable::default(), &[]), &[])?;
    let graph = backend.capture(&mut arena, &[])?;
    let id: ArenaId = backend.arena_id(&arena);
    let guard = Guard::new(Facts::gather(id, layout, manifest, &hyper));
    let clock = Instant::now();
    for _ in 0..REPEATS {
        let checked = backend.check_graph(&arena, &graph).and_then(|()| {
            let admitted = guard.admit(id, layout, manifest, &hyper)?;
            std::hint::black_box(admitted);
            Ok(())
        });
        checked.map_err(StepError::from)?;
    }
    Ok(clock.elapsed().as_secs_f64() * 1e6 / REPEATS as f64)
}

/// What digesting all parameters costs.
fn digested(run: &mut Run<AnyDevice>) -> Result<Digested, Error> {
    let session = run.trainer.session_mut();
    let bytes = session.plan().parameter_count() * 4;
    let mut best = f64::INFINITY;
    for _ in 0..DIGESTS {
        let clock = Instant::now();
        session.root()?;
        best = best.min(milliseconds(clock));
    }
    Ok(Digested { bytes, ms: best })
}

/// Adds up the time of each call over eager steps.
struct CallClock {
    last: Instant,
    /// Milliseconds of each call of the step, over all steps.
    ms: Vec<f64>,
}

impl Observe<AnyDevice> for CallClock {
    fn after(
        &mut self,
        index: usize,
        _call: &PlacedCall,
        _arena: (&AnyDevice, &<AnyDevice as Backend>::Arena),
    ) -> Result<(), DeviceError> {
        let now = Instant::now();
        if let Some(ms) = self.ms.get_mut(index) {
            *ms += (now - self.last).as_secs_f64() * 1e3;
        }
        self.last = now;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_rests_and_is_heated_as_long_as_is_asked() {
        let prepared = |rest, preheat| {
            let (clock, mut steps) = (Instant::now(), 0);
            let step = || {
                steps += 1;
                Ok(())
            };
            Warmth { rest, preheat }.prepare(step).unwrap();
            (clock.elapsed().as_secs_f64(), steps)
        };
        let (none, rested, heated) = (prepared(0, 0), prepared(1, 0), prepared(0, 1));
        assert!(none.0 < 0.5 && none.1 == 0, "{none:?}");
        assert!(rested.0 >= 1.0 && rested.1 == 0, "{rested:?}");
        assert!(heated.0 >= 1.0 && heated.1 > 0, "{heated:?}");
        let failing = Warmth {
            rest: 0,
            preheat: 1,
        }
        .prepare(|| Err(StepError::NoForward.into()));
        assert!(failing.is_err(), "a step that fails is not passed over");
    }
}
