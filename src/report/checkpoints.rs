//! The checkpoints of a run while it trains: copied by the training thread, written by another.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use crate::backend::Backend;
use crate::engine::checkpoint::HostCopy;
use crate::engine::run::Run;
use crate::error::{CheckpointError, Error};
use crate::io::checkpoint::{CHECKPOINTS, Disk, Keep, LocalDisk, list, prune, save};

type Written = Result<PathBuf, CheckpointError>;

/// Saves checkpoints in the background, one at a time.
pub struct CheckpointWriter {
    root: PathBuf,
    /// The recipe's text as the run's folder keeps it.
    recipe: String,
    disk: Arc<dyn Disk>,
    keep: Keep,
    every: Option<u64>,
    keeps_best: bool,
    /// The lowest loss on the data set aside.
    lowest: Option<f64>,
    in_flight: Option<JoinHandle<Written>>,
    last: Option<PathBuf>,
    saved_step: Option<u64>,
}

impl CheckpointWriter {
    /// A writer into the folder of a run whose kept recipe has the text `recipe`.
    pub fn new<B: Backend>(folder: &Path, recipe: String, run: &Run<B>) -> Self {
        let section = &run.recipe.checkpoint;
        CheckpointWriter {
            root: folder.join(CHECKPOINTS),
            recipe,
            disk: Arc::new(LocalDisk),
            keep: Keep {
                last: section.keep_last,
                every: section.keep_every,
                best: None,
            },
            every: section.every,
            keeps_best: section.keep_best == Some(true),
            lowest: None,
            in_flight: None,
            last: None,
            saved_step: None,
        }
    }

    /// The same writer on another file system.
    pub fn on(mut self, disk: Arc<dyn Disk>) -> Self {
        self.disk = disk;
        self
    }

    /// A writer that knows of the best evaluation of the run so far: the steps taken before it and its
    /// loss.
    pub fn with_best(mut self, best: Option<(u64, f64)>) -> Self {
        if self.keeps_best {
            self.keep.best = best.map(|(steps, _)| steps);
            self.lowest = best.map(|(_, loss)| loss);
        }
        self
    }

    /// Saves when the recipe asks for it after the steps taken; `found` is the loss on the data set
    /// aside where it was evaluated after them. Finds the fault of a save before.
    ///
    /// # Errors
    /// As [`CheckpointWriter::save`].
    pub fn after_step<B: Backend>(
        &mut self,
        run: &mut Run<B>,
        found: Option<f64>,
    ) -> Result<(), Error> {
        if self.in_flight.as_ref().is_some_and(JoinHandle::is_finished) {
            self.wait()?;
        }
        let due = self.due(run, found);
        if self.is_best(found) {
            self.lowest = found;
            self.keep.best = Some(run.trainer.session().progress().taken);
        }
        match due {
            true => self.save(run),
            false => Ok(()),
        }
    }

    /// Whether the recipe asks for a checkpoint after the steps taken, `found` being the loss on the
    /// data set aside where it was evaluated after them.
    pub fn due<B: Backend>(&self, run: &Run<B>, found: Option<f64>) -> bool {
        let taken = run.trainer.session().progress().taken;
        let last = taken == run.recipe.steps;
        let scheduled = self
            .every
            .is_some_and(|every| last || taken.is_multiple_of(every));
        scheduled || self.is_best(found)
    }

    /// Whether a loss is the lowest of a run that keeps its best checkpoint.
    fn is_best(&self, found: Option<f64>) -> bool {
        let lower = |loss: f64| loss.is_finite() && self.lowest.is_none_or(|low| loss < low);
        self.keeps_best && found.is_some_and(lower)
    }

    /// The steps taken before the best evaluation, whose checkpoint is kept.
    pub fn best(&self) -> Option<u64> {
        self.keep.best
    }

    /// Copies the state of the run and hands it to a thread that writes it. It first waits for the
    /// checkpoint in flight, so that never more than one copy exists. A step is saved once.
    ///
    /// # Errors
    /// A device fault; the fault of the save before, which leaves every checkpoint as it was.
    pub fn save<B: Backend>(&mut self, run: &mut Run<B>) -> Result<(), Error> {
        let taken = run.trainer.session().progress().taken;
        if self.saved_step == Some(taken) {
            return Ok(());
        }
        self.wait()?;
        let copy = run.host_copy(&self.recipe)?;
        let (disk, root, keep) = (self.disk.clone(), self.root.clone(), self.keep);
        self.in_flight = Some(std::thread::spawn(move || {
            write(&*disk, &root, &copy, keep)
        }));
        self.saved_step = Some(taken);
        Ok(())
    }

    /// Waits for the checkpoint in flight and gives the newest one written by this writer.
    ///
    /// # Errors
    /// The fault of that save, which leaves every checkpoint as it was.
    pub fn wait(&mut self) -> Result<Option<&Path>, CheckpointError> {
        if let Some(thread) = self.in_flight.take() {
            let panicked = |_| CheckpointError::WriterPanicked {
                folder: self.root.display().to_string(),
            };
            let written = thread.join().map_err(panicked).and_then(|written| written);
            if written.is_err() {
                self.saved_step = None;
            }
            self.last = Some(written?);
        }
        Ok(self.last.as_deref())
    }

    /// The newest whole checkpoint of the run, whoever wrote it; a save in flight is waited for.
    pub fn last_written(&mut self) -> Option<PathBuf> {
        let _ = self.wait();
        list(&self.root).ok()?.whole.pop().map(|(_, folder)| folder)
    }
}

impl Drop for CheckpointWriter {
    /// A process that ends must not cut off the save it has begun; its fault was not asked for.
    fn drop(&mut self) {
        let _ = self.wait();
    }
}

fn write(disk: &dyn Disk, root: &Path, copy: &HostCopy, keep: Keep) -> Written {
    let state = copy.state();
    let folder = save(disk, root, state.clone(), &copy.tensors())?;
    // The checkpoint is whole whatever becomes of those that are not kept.
    prune(disk, root, state.step, keep)?;
    Ok(folder)
}

#[cfg(test)]
#[path = "checkpoints_tests.rs"]
mod tests;
