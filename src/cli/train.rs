//! `bitstep train`.

use std::path::PathBuf;

use clap::Args;

use super::device::DeviceArguments;
use super::form::FormArguments;
use super::progress::Progress;
use super::recipe_options::RecipeArguments;
use super::resume::{self, Kept, Opened};
use super::training::{End, Training};
use super::{Outcome, eval, machine, memory, output};
use crate::any_device::AnyDevice;
use crate::engine::run::Run;
use crate::error::{Error, ExitCode};
use crate::io::checkpoint::WhenDamaged;
use crate::report::run_folder::recipe_text;
use crate::report::{Begins, CheckpointWriter, RunFacts, RunFolder, RunOutcome};

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
    #[command(flatten)]
    form: FormArguments,
    /// Shows no progress
    #[arg(long)]
    quiet: bool,
    #[command(flatten)]
    device: DeviceArguments,
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
        let (folder, recorder, checkpoints) = match kept {
            None => (None, None, None),
            Some(kept) => (
                Some(kept.folder),
                Some(kept.recorder),
                Some(kept.checkpoints),
            ),
        };
        let mut training = Training::new(recorder, checkpoints, progress);
        let ended = training
            .steps(&mut run, self.until)
            .and_then(|end| self.finish(&mut run, &mut training, folder.as_ref(), end));
        if ended.is_err() {
            training.note_last_checkpoint();
        }
        ended
    }

    /// Prints the outcome and writes what is kept of a run whose steps have ended.
    fn finish(
        &self,
        run: &mut Run<AnyDevice>,
        training: &mut Training,
        folder: Option<&RunFolder>,
        end: End,
    ) -> Outcome {
        let name = end.name();
        let root = training.summary(run)?;
        let outcome = match end {
            End::Interrupted => training.leave(run).map(|()| ExitCode::Interrupted),
            End::Until => training.leave(run).map(|()| ExitCode::Done),
            End::Stopped(stopped) => {
                let kept = write_results(run, folder);
                kept.and(Err(stopped))
            }
            End::Finished => {
                let scores = eval::print_scores(run);
                // Results are kept whatever the scores and the last checkpoint came to.
                write_results(run, folder)?;
                training.end_checkpoints()?;
                scores.map(|()| ExitCode::Done)
            }
        };
        let told = match folder {
            None => Ok(()),
            Some(folder) => folder.write_outcome(&RunOutcome {
                ended: name.to_owned(),
                steps: run.trainer.session().progress().taken,
                root: root.to_string(),
            }),
        };
        let code = outcome?;
        told?;
        Ok(code)
    }

    /// The run, new or gone on with.
    fn open(&self) -> Result<Opened, Error> {
        if let Some(folder) = &self.resume {
            let when_damaged = match self.resume_previous {
                true => WhenDamaged::UsePrevious,
                false => WhenDamaged::Refuse,
            };
            return resume::open(folder, when_damaged, (&self.device, &self.form));
        }
        let arguments = RecipeArguments {
            recipe: self.recipe.clone().unwrap_or_default(),
            set: self.set.clone(),
        };
        let recipe = arguments.open(self.steps.map(|n| format!("steps={n}")))?;
        let recipe = self.form.apply(recipe)?;
        let folder = self.out.as_deref().map(RunFolder::claim).transpose()?;
        let device = self.device.open()?;
        let (run, memory) = memory::open(recipe, &device)?;
        let kept = match folder {
            None => None,
            Some(folder) => {
                let begins = Begins {
                    taken: 0,
                    wall_s: machine::wall_s(),
                };
                let facts = RunFacts::of(&run, &device);
                let session = run.trainer.session();
                let recorder = folder.begin(&run.recipe, session, (&facts, begins))?;
                let text = recipe_text(&run.recipe)?;
                let checkpoints = CheckpointWriter::new(folder.path(), text, &run);
                Some(Kept {
                    folder,
                    recorder,
                    checkpoints,
                })
            }
        };
        Ok(Opened { run, memory, kept })
    }
}

/// Writes the model where one is kept and says what stands where.
fn write_results(run: &mut Run<AnyDevice>, folder: Option<&RunFolder>) -> Result<(), Error> {
    let Some(folder) = folder else {
        output::line("nothing was written: --out DIR keeps the model and the metrics");
        return Ok(());
    };
    let mut files = "recipe.toml, manifest.txt, metrics.jsonl".to_owned();
    if run.recipe.checkpoint.save_model {
        folder.write_model(&run.recipe, run.trainer.session_mut())?;
        files += ", model/";
    }
    let path = folder.path().display();
    output::line(format_args!("written to {path}: {files}"));
    Ok(())
}

/// What is about to run, in one line.
fn introduction(run: &Run<AnyDevice>) -> String {
    let session = run.trainer.session();
    let plan = session.plan();
    format!(
        "{}: {} parameters, {} steps of {} x {} tokens, arena of {}, on {}",
        run.recipe.name,
        plan.parameter_count(),
        run.recipe.steps,
        plan.config.batch,
        plan.inputs.seq_len,
        output::bytes(plan.layout.arena_bytes()),
        session.device().description,
    )
}
