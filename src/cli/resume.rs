//! `bitstep train --resume`: a run that goes on from its newest checkpoint.

use std::path::Path;

use super::device::DeviceArguments;
use super::form::FormArguments;
use super::{machine, memory, output};
use crate::any_device::AnyDevice;
use crate::engine::run::Run;
use crate::error::{Error, RunError};
use crate::io::checkpoint::{
    CHECKPOINTS, LocalDisk, WhenDamaged, clear_unfinished, newest, set_aside,
};
use crate::report::{Begins, CheckpointWriter, Recorder, RunFacts, RunFolder, RunHistory};

/// A run ready for its next step.
pub struct Opened {
    pub run: Run<AnyDevice>,
    /// The table of its memory.
    pub memory: String,
    pub kept: Option<Kept>,
}

/// Where a run leaves what it comes to.
pub struct Kept {
    pub folder: RunFolder,
    pub recorder: Recorder,
    pub checkpoints: CheckpointWriter,
}

/// Opens the run in `path` where its newest checkpoint left it. Nothing on the disk changes before
/// everything fits.
///
/// # Errors
/// No checkpoint, a damaged one, one that does not fit the run's recipe; else as [`Run::open`].
pub fn open(
    path: &Path,
    when_damaged: WhenDamaged,
    (device, form): (&DeviceArguments, &FormArguments),
) -> Result<Opened, Error> {
    let (folder, recipe) = RunFolder::reopen(path)?;
    let root = path.join(CHECKPOINTS);
    let found = newest(&root, when_damaged)?;
    let recipe = form.apply(recipe)?;
    let text = recipe.to_toml()?;
    let device = device.open()?;
    let (mut run, memory) = memory::open(recipe, &device)?;
    run.resume(&found.checkpoint, &text)?;
    for (folder, reason) in &found.damaged {
        let aside = set_aside(&LocalDisk, &root, folder)?;
        output::note(format_args!(
            "{} is damaged and stands aside as {}: {reason}",
            folder.display(),
            aside.display()
        ));
    }
    for unfinished in &found.unfinished {
        output::note(format_args!(
            "{} is what an interrupted save has left, and is removed",
            unfinished.display()
        ));
    }
    clear_unfinished(&LocalDisk, &found.unfinished)?;
    let state = &found.checkpoint.state;
    output::note(format_args!(
        "going on from {} after {} steps",
        found.checkpoint.folder.display(),
        state.step
    ));
    if let (Some(window), None) = (&state.window, run.trainer.session().window()) {
        output::note(format_args!(
            "{} grains of the next step are computed again: its passes are others than those of the checkpoint",
            window.grains
        ));
    }
    let begins = Begins {
        taken: state.step,
        wall_s: machine::wall_s(),
    };
    let facts = RunFacts::of(&run, &device);
    let recorder = folder.go_on(&run.recipe, &facts, begins)?;
    let checkpoints = CheckpointWriter::new(path, text, &run).with_best(best(path)?);
    Ok(Opened {
        run,
        memory,
        kept: Some(Kept {
            folder,
            recorder,
            checkpoints,
        }),
    })
}

/// The best evaluation that the run's metrics tell of.
fn best(path: &Path) -> Result<Option<(u64, f64)>, Error> {
    let history = match RunHistory::read(path) {
        Err(RunError::NoSteps { .. }) => return Ok(None),
        history => history?,
    };
    let best = history.best();
    Ok(best.and_then(|(steps, found)| Some((steps, found.loss?))))
}
