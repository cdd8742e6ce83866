//! `bitstep bench`.
//!
//! Times hold for the machine and the moment. The step is timed alone: batches are made before the
//! clock starts.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use serde_json::json;

use super::Outcome;
use super::device::DeviceArguments;
use super::machine;
use crate::any_device::AnyDevice;
use crate::backend::{ArenaId, Backend};
use crate::data::Batch;
use crate::engine::guard::{Facts, Guard};
use crate::engine::run::Run;
use crate::engine::step::Observe;
use crate::error::{DeviceError, Error, ExitCode};
use crate::io::Recipe;
use crate::layout::{Layout, PlacedCall};
use crate::plan::ProgramKind;
use crate::program::SlotTable;

/// Repetitions of what takes microseconds.
const REPEATS: usize = 200;

/// Arguments of `bitstep bench`.
#[derive(Args, Debug)]
pub struct Bench {
    /// The recipe, a TOML file
    recipe: PathBuf,
    /// Timed steps of each kind, eager and replayed
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..), value_name = "N")]
    steps: u32,
    #[command(flatten)]
    device: DeviceArguments,
    /// Also print how the time of an eager step divides over the ops
    #[arg(long)]
    profile: bool,
    /// Print one line of JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// What was measured.
struct Measured {
    eager_ms: Vec<f64>,
    replayed_ms: Vec<f64>,
    first_replay_ms: f64,
    guard_us: f64,
    digest_gb_s: f64,
    peak: f64,
    profile: Option<Profile>,
}

impl Bench {
    /// Measures; `start` is the start of the process.
    pub fn run(self, start: Instant) -> Outcome {
        let recipe = Recipe::from_path(&self.recipe)?;
        let backend = self.device.open()?;
        let mut run = super::memory::open_reported(recipe, &backend)?;
        let measured = self.measure(&mut run, &backend, start)?;
        match self.json {
            true => say!("{}", measured.json(&run, &backend)),
            false => measured.print(&run, &backend),
        }
        Ok(ExitCode::Done)
    }

    fn measure(
        &self,
        run: &mut Run<AnyDevice>,
        backend: &AnyDevice,
        start: Instant,
    ) -> Result<Measured, Error> {
        // Warm-up, capture and proof, as a training run has them, up to the first replay.
        for _ in 0..=run.recipe.warmup_steps {
            run.step(None)?;
        }
        let first_replay_ms = milliseconds(start);
        let (mut replayed_ms, mut eager_ms) = (Vec::new(), Vec::new());
        for _ in 0..self.steps {
            let batch = next_batch(run)?;
            let clock = Instant::now();
            run.trainer.step(&batch)?;
            replayed_ms.push(milliseconds(clock));
        }
        let guard_us = guard_microseconds(run, backend)?;
        let digest_gb_s = digest_rate(run)?;
        run.trainer.thaw();
        let hyper = *run.trainer.hyper_mut();
        for _ in 0..self.steps {
            let batch = next_batch(run)?;
            let clock = Instant::now();
            run.trainer.session_mut().step(&batch, &hyper)?;
            eager_ms.push(milliseconds(clock));
        }
        let mut profile = None;
        if self.profile {
            let mut timer = Profile::new(run, self.steps);
            for _ in 0..self.steps {
                let batch = next_batch(run)?;
                timer.last = Instant::now();
                let session = run.trainer.session_mut();
                session.step_observed(&batch, &hyper, Some(&mut timer))?;
            }
            profile = Some(timer);
        }
        Ok(Measured {
            eager_ms,
            replayed_ms,
            first_replay_ms,
            guard_us,
            digest_gb_s,
            peak: backend.fma_peak(),
            profile,
        })
    }
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

fn next_batch(run: &Run<AnyDevice>) -> Result<Batch, Error> {
    let step = run.trainer.session().progress().taken;
    Ok(run.loader.batch_at(step)?)
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
        checked.map_err(crate::error::StepError::from)?;
    }
    Ok(clock.elapsed().as_secs_f64() * 1e6 / REPEATS as f64)
}

/// Gigabytes a second at which the parameters are digested.
fn digest_rate(run: &mut Run<AnyDevice>) -> Result<f64, Error> {
    let session = run.trainer.session_mut();
    let bytes = session.plan().parameter_count() * 4;
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let clock = Instant::now();
        session.root()?;
        best = best.min(clock.elapsed().as_secs_f64());
    }
    Ok(bytes as f64 / best.max(1e-9) / 1e9)
}

/// The value below which a share `at` of the times lie; 0 for no times.
fn percentile(times: &[f64], at: f64) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (at * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or(0.0)
}

impl Measured {
    fn median_ms(&self) -> f64 {
        percentile(&self.replayed_ms, 0.5)
    }

    /// Floating-point operations a second of a replayed step, and their share of the peak.
    fn flop_rate(&self, run: &Run<AnyDevice>) -> (f64, f64) {
        let flops = run.trainer.session().plan().flops(ProgramKind::Step);
        let rate = flops as f64 / (self.median_ms() / 1e3);
        (rate, rate / self.peak)
    }

    fn json(&self, run: &Run<AnyDevice>, backend: &AnyDevice) -> serde_json::Value {
        let session = run.trainer.session();
        let plan = session.plan();
        let (rate, share) = self.flop_rate(run);
        let profile = self.profile.as_ref().map(|profile| {
            let rows = profile.rows().into_iter();
            rows.map(|row| json!({"op": row.stem, "calls": row.calls, "ms": row.ms}))
                .collect::<Vec<_>>()
        });
        json!({
            "recipe": run.recipe.name,
            "machine": machine::processor(),
            "device": backend.info().description,
            "threads": backend.cpu().map(|cpu| cpu.context().threads()),
            "simd": backend.cpu().map(|cpu| cpu.context().path().name()),
            "manifest": session.manifest().hash().to_hex().to_string(),
            "steps": self.replayed_ms.len(),
            "tokens_per_step": plan.tokens(),
            "parameters": plan.parameter_count(),
            "replayed_ms_p50": self.median_ms(),
            "replayed_ms_p95": percentile(&self.replayed_ms, 0.95),
            "replayed_ms_best": percentile(&self.replayed_ms, 0.0),
            "eager_ms_best": percentile(&self.eager_ms, 0.0),
            "eager_ms_p50": percentile(&self.eager_ms, 0.5),
            "eager_ms_p95": percentile(&self.eager_ms, 0.95),
            "first_replay_ms": self.first_replay_ms,
            "tokens_per_s": plan.tokens() as f64 / (self.median_ms() / 1e3),
            "flop_per_step": plan.flops(ProgramKind::Step),
            "flop_per_s": rate,
            "peak_flop_per_s": self.peak,
            "share_of_peak": share,
            "arena_bytes": plan.layout.arena_bytes(),
            "digest_gb_per_s": self.digest_gb_s,
            "guard_us": self.guard_us,
            "profile": profile,
        })
    }

    fn print(&self, run: &Run<AnyDevice>, backend: &AnyDevice) {
        let session = run.trainer.session();
        let plan = session.plan();
        let (rate, share) = self.flop_rate(run);
        say!(
            "{}: {} tokens a step, {} parameters, {} timed steps of each kind",
            run.recipe.name,
            plan.tokens(),
            plan.parameter_count(),
            self.replayed_ms.len()
        );
        say!("  machine        {}", machine::processor());
        say!("  device         {}", backend.info().description);
        say!("  manifest       {}", session.manifest().hash());
        for (name, times) in [("replayed", &self.replayed_ms), ("eager", &self.eager_ms)] {
            say!(
                "  {name:<14} {:.3} ms median, {:.3} ms p95, {:.3} ms best",
                percentile(times, 0.5),
                percentile(times, 0.95),
                percentile(times, 0.0)
            );
        }
        say!(
            "  first replay   {:.0} ms after the process started (plan, {} eager steps, capture, proof)",
            self.first_replay_ms,
            run.recipe.warmup_steps
        );
        say!(
            "  tokens         {:.0} a second",
            plan.tokens() as f64 / (self.median_ms() / 1e3)
        );
        say!(
            "  arithmetic     {:.1} GFLOP/s, {:.1} % of the FMA peak, {:.1} GFLOP/s",
            rate / 1e9,
            share * 100.0,
            self.peak / 1e9
        );
        say!("  arena          {} bytes", plan.layout.arena_bytes());
        say!(
            "  digest         {:.2} GB/s over the parameters",
            self.digest_gb_s
        );
        say!("  guard          {:.2} µs a replay", self.guard_us);
        if let Some(profile) = &self.profile {
            profile.print();
        }
    }
}

/// Adds up the time of each op over eager steps.
struct Profile {
    last: Instant,
    steps: u32,
    /// Seconds of each call of the step, over all steps.
    seconds: Vec<f64>,
    /// The op and the floating-point operations of each call.
    calls: Vec<(&'static str, u64)>,
}

/// One op's share of a step.
struct ProfileRow {
    stem: &'static str,
    calls: usize,
    ms: f64,
    gflops: f64,
}

impl Profile {
    fn new(run: &Run<AnyDevice>, steps: u32) -> Self {
        let plan = run.trainer.session().plan();
        let calls = plan.calls(ProgramKind::Step).iter();
        let calls: Vec<_> = calls
            .map(|c| (c.op.rule().stem(), c.op.rule().flops()))
            .collect();
        Profile {
            last: Instant::now(),
            steps,
            seconds: vec![0.0; calls.len()],
            calls,
        }
    }

    /// The ops, the slowest first.
    fn rows(&self) -> Vec<ProfileRow> {
        let mut rows: Vec<ProfileRow> = Vec::new();
        let steps = f64::from(self.steps);
        for (&(stem, flops), seconds) in self.calls.iter().zip(&self.seconds) {
            let ms = seconds * 1e3 / steps;
            let gflops = flops as f64 / 1e9;
            match rows.iter_mut().find(|row| row.stem == stem) {
                Some(row) => {
                    row.calls += 1;
                    row.ms += ms;
                    row.gflops += gflops;
                }
                None => rows.push(ProfileRow {
                    stem,
                    calls: 1,
                    ms,
                    gflops,
                }),
            }
        }
        for row in &mut rows {
            row.gflops /= (row.ms / 1e3).max(1e-12);
        }
        rows.sort_by(|a, b| b.ms.total_cmp(&a.ms));
        rows
    }

    fn print(&self) {
        let rows = self.rows();
        let all: f64 = rows.iter().map(|row| row.ms).sum();
        say!("where an eager step's time goes:");
        say!(
            "  {:<26} {:>5} {:>9} {:>7} {:>9}",
            "op",
            "calls",
            "ms",
            "share",
            "GFLOP/s"
        );
        for row in rows {
            let rate = match row.gflops > 0.0 {
                true => format!("{:.1}", row.gflops),
                false => "-".into(),
            };
            let share = 100.0 * row.ms / all;
            say!(
                "  {:<26} {:>5} {:>9.3} {share:>6.1}% {rate:>9}",
                row.stem,
                row.calls,
                row.ms
            );
        }
        say!("  {:<26} {:>5} {all:>9.3}", "all", self.calls.len());
    }
}

impl Observe<AnyDevice> for Profile {
    fn after(
        &mut self,
        index: usize,
        _call: &PlacedCall,
        _arena: (&AnyDevice, &<AnyDevice as Backend>::Arena),
    ) -> Result<(), DeviceError> {
        let now = Instant::now();
        if let Some(seconds) = self.seconds.get_mut(index) {
            *seconds += (now - self.last).as_secs_f64();
        }
        self.last = now;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_that_occurred() {
        let times = [4.0, 1.0, 3.0, 2.0];
        assert_eq!(percentile(&times, 0.5), 2.0);
        assert_eq!(percentile(&times, 0.95), 4.0);
        assert_eq!(percentile(&times, 0.0), 1.0);
        assert_eq!(percentile(&[7.0], 0.5), 7.0);
        assert_eq!(percentile(&[], 0.5), 0.0);
    }
}
