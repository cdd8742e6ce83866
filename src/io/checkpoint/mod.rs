//! Checkpoints: `checkpoints/step-N/` in the folder of a run.
//!
//! A folder holds `tensors.safetensors`, `state.json` and, written last, `state.blake3`, the digest of
//! `state.json`, which in turn has the digest of every tensor. It is written under another name, all
//! of it is on the disk, and then it is renamed: a folder named `step-N` is whole, or the disk has
//! damaged it since, which its digests tell.

mod disk;
mod load;
mod save;
mod state;

use std::path::{Path, PathBuf};

pub use disk::{Disk, DiskFile, LocalDisk};
pub use load::{Found, StoredCheckpoint, StoredTensor, WhenDamaged, newest, read};
pub use save::{Keep, RawTensor, clear_unfinished, prune, save, set_aside};
pub use state::{
    CheckpointState, DataCursor, FORMAT, ScaleState, SchedulePosition, TensorRecord, WindowState,
};

use crate::error::CheckpointError;

/// The folder of checkpoints in the folder of a run.
pub const CHECKPOINTS: &str = "checkpoints";
/// The tensors of a checkpoint.
pub const TENSORS: &str = "tensors.safetensors";
/// What a checkpoint states.
pub const STATE: &str = "state.json";
/// The digest of [`STATE`].
pub const STATE_DIGEST: &str = "state.blake3";

/// The start of a whole checkpoint's name.
const STEP: &str = "step-";
/// The start of the name of a checkpoint that is being written.
const WRITING: &str = ".writing-";
/// The start of the name of a checkpoint that is being removed.
const REMOVING: &str = ".removing-";
/// The start of the name of a checkpoint that was found damaged.
const DAMAGED: &str = "damaged-";

/// What a folder of checkpoints holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// Folders named `step-N`, by step.
    pub whole: Vec<(u64, PathBuf)>,
    /// Folders of a save or a removal that did not end, by name.
    pub unfinished: Vec<PathBuf>,
}

/// Lists a folder of checkpoints; one that does not exist holds none.
///
/// # Errors
/// [`CheckpointError::Read`].
pub fn list(root: &Path) -> Result<Listing, CheckpointError> {
    let failed = |source| CheckpointError::Read {
        path: root.display().to_string(),
        source,
    };
    let mut listing = Listing::default();
    let entries = match std::fs::read_dir(root) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(listing),
        entries => entries.map_err(failed)?,
    };
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(WRITING) || name.starts_with(REMOVING) {
            listing.unfinished.push(path);
        } else if let Some(step) = step_of(&name) {
            listing.whole.push((step, path));
        }
    }
    listing.whole.sort();
    listing.unfinished.sort();
    Ok(listing)
}

/// The name of the checkpoint after `step` steps.
pub fn step_name(step: u64) -> String {
    format!("{STEP}{step}")
}

/// The step of a name that [`step_name`] gives.
fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix(STEP)?.parse().ok()?;
    (step_name(step) == name).then_some(step)
}

#[cfg(test)]
#[path = "../checkpoint_tests.rs"]
mod tests;
