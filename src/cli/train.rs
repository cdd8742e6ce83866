//! `bitstep train`.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;

use super::device::DeviceArguments;
use super::progress::Progress;
use super::recipe_options::RecipeArguments;
use super::resume::{self, Opened};
use super::signals::EndRequest;
use super::{Outcome, eval, memory, output};
use crate::backend::Backend;
use crate::engine::StepReport;
use crate::engine::run::Run;
use crate::error::{Error, ExitCode, RunError};
use crate::io::checkpoint::WhenDamaged;
use crate::op::step_values::{Dropped, canonical_bits};
use crate::report::metrics::Timing;
use crate::report::run_folder::recipe_text;
use crate::report::{CheckpointWriter, MetricsLine, MetricsWriter, Phase, RunFolder};

/// Arguments of `bitstep train`.
#[derive(Args, Debug)]
pub struct Train {
    /// The recipe, a TOML file
    #[arg(value_name = "RECIPE", required_unless_present = "resume")]
    recipe: Option<PathBuf>,
    /// Changes a key of the recipe, such as optimizer.lr=1e-3; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Steps to take, in place of the recipe's
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// A new folder for recipe, manifest, metrics, checkpoints and model; without it nothing is kept
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Goes on with the run in this folder from its newest checkpoint
    #[arg(long, value_name = "RUN_DIR", conflicts_with_all = ["recipe", "set", "steps", "out"])]
    resume: Option<PathBuf>,
    /// Where the newest checkpoint is damaged, sets it aside and goes on from the one before
    #[arg(long, requires = "resume")]
    resume_previous: bool,
    /// Saves a checkpoint and ends once the run has taken so many steps
    #[arg(long, value_name = "N")]
    until: Option<u64>,
    /// Shows no progress
    #[arg(long)]
    quiet: bool,
    #[command(flatten)]
    device: DeviceArguments,
}

/// Why the steps of a run came to an end.
enum End {
    /// All are taken.
    Finished,
    /// So many as were asked for.
    Until,
    /// A signal.
    Interrupted,
    /// What ends a run but leaves what was trained before.
    Stopped(Error),
}

impl Train {
    /// Trains, writes the run's folder and prints the outcome.
    pub fn run(self) -> Outcome {
        let Opened {
            mut run,
            memory,
            kept,
        } = self.open()?;
        let progress = match self.quiet {
            true => Progress::Quiet,
            false => {
                output::note(introduction(&run));
                output::note(memory);
                let before = run.trainer.session().progress().taken;
                Progress::shown(run.recipe.steps, before)
            }
        };
        let (folder, metrics, checkpoints) = match kept {
            None => (None, None, None),
            Some(kept) => (
                Some(kept.folder),
                Some(kept.metrics),
                Some(kept.checkpoints),
            ),
        };
        let mut training = Training::new(metrics, checkpoints, progress);
        let end = match training.steps(&mut run, self.until) {
            Ok(end) => end,
            // Data that ends a run does not take the weights trained before it.
            Err(error @ Error::Data(_)) => End::Stopped(error),
            Err(error) => {
                training.note_last_checkpoint();
                return Err(error);
            }
        };
        training.summary(&mut run)?;
        let outcome = match end {
            End::Interrupted => return training.leave(&mut run, ExitCode::Interrupted),
            End::Until => return training.leave(&mut run, ExitCode::Done),
            End::Stopped(stopped) => Err(stopped),
            End::Finished => eval::print_scores(&mut run).map(|()| ExitCode::Done),
        };
        // Results are kept whatever the scores and the last checkpoint came to.
        match &folder {
            None => output::line("nothing was written: --out DIR keeps the model and the metrics"),
            Some(folder) if run.recipe.checkpoint.save_model => {
                folder.write_model(&run.recipe, run.trainer.session_mut())?;
                let left = match run.recipe.lora.config() {
                    None => "model/",
                    Some(_) => "adapter/",
                };
                let files = format!("recipe.toml, manifest.txt, metrics.jsonl, {left}");
                output::line(written(folder, &files));
            }
            Some(folder) => {
                output::line(written(folder, "recipe.toml, manifest.txt, metrics.jsonl"));
            }
        }
        let saved = match &mut training.checkpoints {
            Some(checkpoints) => checkpoints.wait().map(|_| ()),
            None => Ok(()),
        };
        let code = outcome?;
        saved?;
        Ok(code)
    }

    /// The run, new or gone on with.
    fn open(&self) -> Result<Opened, Error> {
        if let Some(folder) = &self.resume {
            let when_damaged = match self.resume_previous {
                true => WhenDamaged::UsePrevious,
                false => WhenDamaged::Refuse,
            };
            return resume::open(folder, when_damaged, &self.device);
        }
        let arguments = RecipeArguments {
            recipe: self.recipe.clone().unwrap_or_default(),
            set: self.set.clone(),
        };
        let recipe = arguments.open(self.steps.map(|n| format!("steps={n}")))?;
        let folder = self.out.as_deref().map(RunFolder::claim).transpose()?;
        let (run, memory) = memory::open(recipe, &self.device.open()?)?;
        let kept = match folder {
            None => None,
            Some(folder) => {
                let metrics = folder.begin(&run.recipe, run.trainer.session())?;
                let text = recipe_text(&run.recipe)?;
                let checkpoints = CheckpointWriter::new(folder.path(), text, &run);
                Some(resume::Kept {
                    folder,
                    metrics,
                    checkpoints,
                })
            }
        };
        Ok(Opened { run, memory, kept })
    }
}

fn written(folder: &RunFolder, files: &str) -> String {
    format!("written to {}: {files}", folder.path().display())
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
    checkpoints: Option<CheckpointWriter>,
    progress: Progress,
    start: Instant,
    seconds: f64,
    taken: u64,
    dropped: u64,
    last: Option<StepReport>,
}

impl Training {
    fn new(
        metrics: Option<MetricsWriter>,
        checkpoints: Option<CheckpointWriter>,
        progress: Progress,
    ) -> Self {
        Training {
            metrics,
            checkpoints,
            progress,
            start: Instant::now(),
            seconds: 0.0,
            taken: 0,
            dropped: 0,
            last: None,
        }
    }

    /// Takes the steps that are left and says what ended them.
    fn steps<B: Backend>(&mut self, run: &mut Run<B>, until: Option<u64>) -> Result<End, Error> {
        let request = EndRequest::listen();
        self.start = Instant::now();
        let end = loop {
            let taken = run.trainer.session().progress().taken;
            if taken >= run.recipe.steps {
                break End::Finished;
            }
            if request.heard() {
                break End::Interrupted;
            }
            if until.is_some_and(|until| taken >= until) {
                break End::Until;
            }
            if let Some(stopped) = self.step(run)? {
                break End::Stopped(stopped.into());
            }
        };
        self.progress.end();
        match &mut self.metrics {
            None => {}
            Some(metrics) => metrics.flush()?,
        }
        Ok(end)
    }

    /// One step, its numbers and its checkpoint; gives the reason when a value that is not finite ends
    /// the run.
    fn step<B: Backend>(&mut self, run: &mut Run<B>) -> Result<Option<RunError>, Error> {
        let begun = Instant::now();
        let report = run.step(None)?;
        let step_s = begun.elapsed().as_secs_f64();
        self.taken += 1;
        self.seconds = self.start.elapsed().as_secs_f64();
        self.record(run, &report, step_s)?;
        let stopped = non_finite(&report);
        if stopped.is_some() {
            self.note_last_checkpoint();
            return Ok(stopped);
        }
        if !report.applied() {
            self.dropped += 1;
            self.progress.note(&spike(&report, run));
        }
        self.last = Some(report);
        if let (Some(checkpoints), Some(metrics)) = (&mut self.checkpoints, &mut self.metrics) {
            // A checkpoint must not know of steps whose lines a kill could still take.
            if checkpoints.due(run) {
                metrics.flush()?;
            }
            checkpoints.after_step(run)?;
        }
        Ok(None)
    }

    /// Names the checkpoint that a run which fails leaves.
    fn note_last_checkpoint(&mut self) {
        let last = match &mut self.checkpoints {
            Some(checkpoints) => checkpoints.last_written(),
            None => None,
        };
        if let Some(last) = last {
            let text = format!("the last checkpoint is {}", last.display());
            self.progress.note(&text);
        }
    }

    /// Saves the run as it is and ends with `code`.
    fn leave<B: Backend>(&mut self, run: &mut Run<B>, code: ExitCode) -> Outcome {
        let Some(checkpoints) = &mut self.checkpoints else {
            output::line("nothing was saved: --out DIR keeps checkpoints");
            return Ok(code);
        };
        checkpoints.save(run)?;
        if let Some(folder) = checkpoints.wait()? {
            let steps = run.trainer.session().progress().taken;
            let folder = folder.display();
            output::line(format_args!(
                "saved       {folder} after {steps} of {} steps; --resume goes on from it",
                run.recipe.steps
            ));
        }
        Ok(code)
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
