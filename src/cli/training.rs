//! The steps of `bitstep train`: each with its numbers, its evaluation and its checkpoint.

use std::time::Instant;

use super::progress::Progress;
use super::signals::EndRequest;
use super::{machine, output};
use crate::backend::Backend;
use crate::engine::StepReport;
use crate::engine::run::{Run, Validation};
use crate::error::{Error, RunError};
use crate::op::step_values::{Dropped, canonical_bits};
use crate::report::metrics::Timing;
use crate::report::{CheckpointWriter, GroupNorms, MetricsLine, Phase, Recorder};

/// Why the steps of a run came to an end.
pub enum End {
    /// All are taken.
    Finished,
    /// So many as were asked for.
    Until,
    /// A signal.
    Interrupted,
    /// What ends a run but leaves what was trained before.
    Stopped(Error),
}

impl End {
    /// The end as the run's folder names it.
    pub fn name(&self) -> &'static str {
        match self {
            End::Finished => "finished",
            End::Until => "until",
            End::Interrupted => "interrupted",
            End::Stopped(_) => "stopped",
        }
    }
}

/// The steps of a run and where their numbers go.
pub struct Training {
    recorder: Option<Recorder>,
    checkpoints: Option<CheckpointWriter>,
    progress: Progress,
    start: Instant,
    seconds: f64,
    taken: u64,
    dropped: u64,
    last: Option<StepReport>,
}

impl Training {
    /// No step is taken yet.
    pub fn new(
        recorder: Option<Recorder>,
        checkpoints: Option<CheckpointWriter>,
        progress: Progress,
    ) -> Self {
        Training {
            recorder,
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
    ///
    /// # Errors
    /// A device fault; a file that cannot be written.
    pub fn steps<B: Backend>(
        &mut self,
        run: &mut Run<B>,
        until: Option<u64>,
    ) -> Result<End, Error> {
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
            match self.step(run) {
                Ok(None) => {}
                Ok(Some(stopped)) => break End::Stopped(stopped.into()),
                // Data that ends a run does not take the weights trained before it.
                Err(error @ Error::Data(_)) => break End::Stopped(error),
                Err(error) => {
                    self.progress.end();
                    return Err(error);
                }
            }
        };
        self.progress.end();
        if let Some(recorder) = &mut self.recorder {
            recorder.flush()?;
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
        let found = self.record(run, &report, step_s)?;
        if let Some(stopped) = non_finite(&report) {
            return Ok(Some(stopped));
        }
        if !report.applied() {
            self.dropped += 1;
            self.progress.note(&spike(&report, run));
        }
        self.last = Some(report);
        if let (Some(checkpoints), Some(recorder)) = (&mut self.checkpoints, &mut self.recorder) {
            let loss = found.map(|found| found.loss());
            // A checkpoint must not know of steps whose lines a kill could still take.
            if checkpoints.due(run, loss) {
                recorder.flush()?;
            }
            checkpoints.after_step(run, loss)?;
        }
        Ok(None)
    }

    /// Names the checkpoint that a run which fails leaves.
    pub fn note_last_checkpoint(&mut self) {
        let last = match &mut self.checkpoints {
            Some(checkpoints) => checkpoints.last_written(),
            None => None,
        };
        if let Some(last) = last {
            let text = format!("the last checkpoint is {}", last.display());
            self.progress.note(&text);
        }
    }

    /// Saves the run as it is.
    ///
    /// # Errors
    /// A checkpoint that cannot be written; a device fault.
    pub fn leave<B: Backend>(&mut self, run: &mut Run<B>) -> Result<(), Error> {
        let Some(checkpoints) = &mut self.checkpoints else {
            output::line("nothing was saved: --out DIR keeps checkpoints");
            return Ok(());
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
        Ok(())
    }

    /// Waits for the last checkpoint and names the best one.
    ///
    /// # Errors
    /// A checkpoint that cannot be written.
    pub fn end_checkpoints(&mut self) -> Result<(), Error> {
        let Some(checkpoints) = &mut self.checkpoints else {
            return Ok(());
        };
        checkpoints.wait()?;
        if let Some(steps) = checkpoints.best() {
            output::line(format_args!(
                "best        step-{steps}, the lowest loss on the data set aside"
            ));
        }
        Ok(())
    }

    /// Gathers and writes the numbers of a step; gives what the data set aside came to after it, where
    /// it was evaluated. Gradients are looked at before an evaluation runs over the same memory.
    fn record<B: Backend>(
        &mut self,
        run: &mut Run<B>,
        report: &StepReport,
        step_s: f64,
    ) -> Result<Option<Validation>, Error> {
        let kept = self.recorder.is_some();
        let squares = match kept {
            true => run.grad_squares_after(report)?,
            false => None,
        };
        let root = match kept {
            true => run.root_after(report)?,
            false => None,
        };
        // A step that ends the run has left no weights worth a number.
        let found = match non_finite(report) {
            None => run.validation_after(report)?,
            Some(_) => None,
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
        let line = MetricsLine {
            validation: found.map(Into::into),
            group_norms: squares.map(|of| GroupNorms::of(session.plan(), &of)),
            ..MetricsLine::new(report, phase, timing).with_root(root)
        };
        self.progress.step(&line, self.tokens_per_s(run));
        if let Some(found) = &found {
            self.progress.evaluated(report.step + 1, found);
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.write(&line, machine::wall_s())?;
        }
        Ok(found)
    }

    fn tokens_per_s<B: Backend>(&self, run: &Run<B>) -> f64 {
        let tokens = self.taken as f64 * run.trainer.session().plan().tokens() as f64;
        tokens / self.seconds.max(1e-9)
    }

    /// Prints what the run came to and gives its root.
    ///
    /// # Errors
    /// A device fault.
    pub fn summary<B: Backend>(&self, run: &mut Run<B>) -> Result<blake3::Hash, Error> {
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
        Ok(root)
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

#[cfg(test)]
#[path = "training_tests.rs"]
mod tests;
