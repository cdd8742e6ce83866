//! `bitstep train`.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;

use super::device::DeviceArguments;
use super::progress::Progress;
use super::recipe_options::RecipeArguments;
use super::{Outcome, eval, memory, output};
use crate::backend::Backend;
use crate::engine::StepReport;
use crate::engine::run::Run;
use crate::error::{Error, ExitCode, RunError};
use crate::op::step_values::{Dropped, canonical_bits};
use crate::report::metrics::Timing;
use crate::report::{MetricsLine, MetricsWriter, Phase, RunFolder};

/// Arguments of `bitstep train`.
#[derive(Args, Debug)]
pub struct Train {
    #[command(flatten)]
    recipe: RecipeArguments,
    /// Steps to take, in place of the recipe's
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// A new folder for recipe, manifest, metrics and model; without it nothing is kept
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Shows no progress
    #[arg(long)]
    quiet: bool,
    #[command(flatten)]
    device: DeviceArguments,
}

impl Train {
    /// Trains, writes the run's folder and prints the outcome.
    pub fn run(self) -> Outcome {
        let recipe = self.recipe.open(self.steps.map(|n| format!("steps={n}")))?;
        let folder = self.out.as_deref().map(RunFolder::claim).transpose()?;
        let (mut run, memory) = memory::open(recipe, &self.device.open()?)?;
        let metrics = match &folder {
            None => None,
            Some(folder) => Some(folder.begin(&run.recipe, run.trainer.session())?),
        };
        let progress = match self.quiet {
            true => Progress::Quiet,
            false => {
                output::note(introduction(&run));
                output::note(memory);
                Progress::shown(run.recipe.steps)
            }
        };
        let mut training = Training::new(metrics, progress);
        // Data that ends a run does not take the weights trained before it.
        let stopped = match training.steps(&mut run) {
            Ok(stopped) => stopped.map(Error::from),
            Err(error @ Error::Data(_)) => Some(error),
            Err(error) => return Err(error),
        };
        training.summary(&mut run)?;
        let outcome = match stopped {
            Some(stopped) => Err(stopped),
            None => eval::print_scores(&mut run).map(|()| ExitCode::Done),
        };
        // Results are kept whatever the scores came to.
        match &folder {
            None => output::line("nothing was written: --out DIR keeps the model and the metrics"),
            Some(folder) if run.recipe.checkpoint.save_model => {
                folder.write_model(&run.recipe, run.trainer.session_mut())?;
                output::line(kept(
                    &self.out,
                    "recipe.toml, manifest.txt, metrics.jsonl, model/",
                ));
            }
            Some(_) => output::line(kept(&self.out, "recipe.toml, manifest.txt, metrics.jsonl")),
        }
        outcome
    }
}

fn kept(folder: &Option<PathBuf>, files: &str) -> String {
    let folder = folder.clone().unwrap_or_default();
    format!("written to {}: {files}", folder.display())
}

/// What is about to run, in one line.
fn introduction<B: Backend>(run: &Run<B>) -> String {
    let session = run.trainer.session();
    let plan = session.plan();
    format!(
        "{}: {} parameters, {} steps of {} x {} tokens, arena of {}, on {}",
        run.recipe.name,
        plan.parameter_count(),
        run.recipe.steps,
        plan.inputs.batch,
        plan.inputs.seq_len,
        output::bytes(plan.layout.arena_bytes()),
        session.device().description,
    )
}

/// The steps of a run and where their numbers go.
struct Training {
    metrics: Option<MetricsWriter>,
    progress: Progress,
    start: Instant,
    seconds: f64,
    taken: u64,
    dropped: u64,
    last: Option<StepReport>,
}

impl Training {
    fn new(metrics: Option<MetricsWriter>, progress: Progress) -> Self {
        Training {
            metrics,
            progress,
            start: Instant::now(),
            seconds: 0.0,
            taken: 0,
            dropped: 0,
            last: None,
        }
    }

    /// Takes every step; gives the reason when a value that is not finite ends the run before.
    fn steps<B: Backend>(&mut self, run: &mut Run<B>) -> Result<Option<RunError>, Error> {
        self.start = Instant::now();
        let mut stopped = None;
        for _ in 0..run.recipe.steps {
            let begun = Instant::now();
            let report = run.step(None)?;
            let step_s = begun.elapsed().as_secs_f64();
            self.taken += 1;
            self.seconds = self.start.elapsed().as_secs_f64();
            self.record(run, &report, step_s)?;
            stopped = non_finite(&report);
            if stopped.is_some() {
                break;
            }
            if !report.applied() {
                self.dropped += 1;
                self.progress.note(&spike(&report, run));
            }
            self.last = Some(report);
        }
        self.progress.end();
        match &mut self.metrics {
            None => {}
            Some(metrics) => metrics.flush()?,
        }
        Ok(stopped)
    }

    fn record<B: Backend>(
        &mut self,
        run: &mut Run<B>,
        report: &StepReport,
        step_s: f64,
    ) -> Result<(), Error> {
        let root = match &self.metrics {
            None => None,
            Some(_) => run.root_after(report)?,
        };
        let session = run.trainer.session();
        let phase = match session.state_name() {
            "replaying" => Phase::Replayed,
            _ => Phase::Eager,
        };
        let timing = Timing {
            step_s,
            elapsed_s: self.seconds,
            tokens: session.plan().tokens(),
        };
        let line = MetricsLine::new(report, phase, timing).with_root(root);
        self.progress.step(&line, self.tokens_per_s(run));
        match &mut self.metrics {
            None => Ok(()),
            Some(metrics) => Ok(metrics.write(&line)?),
        }
    }

    fn tokens_per_s<B: Backend>(&self, run: &Run<B>) -> f64 {
        let tokens = self.taken as f64 * run.trainer.session().plan().tokens() as f64;
        tokens / self.seconds.max(1e-9)
    }

    /// Prints what the run came to.
    fn summary<B: Backend>(&self, run: &mut Run<B>) -> Result<(), Error> {
        if let Some(last) = &self.last {
            let bits = canonical_bits(last.loss);
            output::line(format_args!(
                "final loss  {} (bits {bits:08x}) at step {}",
                last.loss, last.step
            ));
        }
        let root = run.trainer.session_mut().root()?;
        output::line(format_args!("root        {root} (over all parameters)"));
        let manifest = run.trainer.session().manifest().hash();
        output::line(format_args!("manifest    {manifest}"));
        let (seconds, rate) = (self.seconds, self.tokens_per_s(run));
        output::line(format_args!(
            "time        {seconds:.1} s for {} steps, {rate:.0} tokens/s",
            self.taken
        ));
        if self.dropped > 0 {
            output::line(format_args!(
                "dropped     {} steps, whose norm exceeded optimizer.spike_norm",
                self.dropped
            ));
        }
        Ok(())
    }
}

/// Why a run cannot go on after a step.
fn non_finite(report: &StepReport) -> Option<RunError> {
    let (what, found) = match report.dropped {
        d if d.contains(Dropped::NON_FINITE_LOSS) => ("loss", report.loss),
        d if d.contains(Dropped::NON_FINITE_NORM) => ("gradient norm", report.grad_norm),
        _ => return None,
    };
    Some(RunError::NonFinite {
        step: report.step,
        what,
        found,
    })
}

fn spike<B: Backend>(report: &StepReport, run: &Run<B>) -> String {
    let limit = run.recipe.optimizer.spike_norm.unwrap_or(f64::INFINITY);
    format!(
        "step {} is dropped: its gradient norm {} exceeds optimizer.spike_norm = {limit}",
        report.step, report.grad_norm
    )
}
