//! Writing a checkpoint, and removing those that are not kept.

use std::io;
use std::path::{Path, PathBuf};

use super::{
    CheckpointState, DAMAGED, Disk, REMOVING, STATE, STATE_DIGEST, TENSORS, TensorRecord, WRITING,
    list, step_name,
};
use crate::error::CheckpointError;
use crate::io::tensors::StoredType;
use crate::io::tensors_write::header_text;

/// Bytes handed to the file system at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// A tensor to be written, its bytes row-major and little-endian.
#[derive(Clone, Copy, Debug)]
pub struct RawTensor<'a> {
    pub name: &'a str,
    /// What the engine uses it for.
    pub role: &'static str,
    pub dtype: StoredType,
    pub dims: &'a [usize],
    pub bytes: &'a [u8],
}

/// Which checkpoints stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keep {
    /// So many of the newest; all when absent.
    pub last: Option<u64>,
    /// Those at multiples of this step, whatever `last` says.
    pub every: Option<u64>,
    /// The one of this step, whatever `last` says.
    pub best: Option<u64>,
}

/// Writes the checkpoint of `state.step` into `root` and gives its folder. One of that name that is
/// there already is replaced. When this fails, or the process ends, at any moment, every other
/// checkpoint is as it was, and this one is whole or absent.
///
/// # Errors
/// [`CheckpointError`]: two tensors of one name, bytes that do not fill their shape, or what the
/// operating system refuses.
pub fn save(
    disk: &dyn Disk,
    root: &Path,
    mut state: CheckpointState,
    tensors: &[RawTensor<'_>],
) -> Result<PathBuf, CheckpointError> {
    let name = step_name(state.step);
    let (folder, temporary) = (root.join(&name), root.join(format!("{WRITING}{name}")));
    let mut tensors = tensors.to_vec();
    tensors.sort_by_key(|tensor| tensor.name);
    let entries = tensors
        .iter()
        .map(|t| (t.name, t.dtype, t.dims, t.bytes.len()));
    let header = header_text(&temporary.join(TENSORS), None, entries)?;
    state.tensors = tensors.iter().map(record).collect();
    let text = serde_json::to_string_pretty(&state).map_err(|e| refused(&temporary, e.into()))?;
    disk.create_folder(root).map_err(|e| refused(root, e))?;
    if let Some(above) = root.parent().filter(|above| !above.as_os_str().is_empty()) {
        disk.sync_folder(above).map_err(|e| refused(above, e))?;
    }
    if temporary.exists() {
        disk.remove_folder(&temporary)
            .map_err(|e| refused(&temporary, e))?;
    }
    let parts = (header.as_bytes(), tensors.as_slice(), text.as_bytes());
    let written = fill(disk, &temporary, parts).and_then(|()| {
        if folder.exists() {
            discard(disk, root, &folder)?;
        }
        disk.rename(&temporary, &folder)
            .and_then(|()| disk.sync_folder(root))
            .map_err(|e| refused(&folder, e))
    });
    if let Err(error) = written {
        // The room that a full disk lacks is given back; that this fails too changes nothing.
        let _ = disk.remove_folder(&temporary);
        return Err(error);
    }
    Ok(folder)
}

/// Removes the checkpoints up to `step` that are not kept; newer ones are not looked at.
///
/// # Errors
/// What the operating system refuses.
pub fn prune(disk: &dyn Disk, root: &Path, step: u64, keep: Keep) -> Result<(), CheckpointError> {
    let Some(last) = keep.last else {
        return Ok(());
    };
    let whole = list(root)?.whole;
    let old = whole.iter().rev().filter(|(of, _)| *of <= step);
    let old = old.skip(usize::try_from(last).unwrap_or(usize::MAX).max(1));
    for (of, folder) in old {
        let multiple = keep.every.is_some_and(|every| of.is_multiple_of(every));
        if !multiple && keep.best != Some(*of) {
            discard(disk, root, folder)?;
        }
    }
    Ok(())
}

/// Gives damaged checkpoints names under which they are never found again.
///
/// # Errors
/// What the operating system refuses.
pub fn set_aside(disk: &dyn Disk, root: &Path, folder: &Path) -> Result<PathBuf, CheckpointError> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let mut aside = root.join(format!("{DAMAGED}{name}"));
    let mut number = 1;
    while aside.exists() {
        number += 1;
        aside = root.join(format!("{DAMAGED}{name}-{number}"));
    }
    disk.rename(folder, &aside)
        .and_then(|()| disk.sync_folder(root))
        .map_err(|e| refused(folder, e))?;
    Ok(aside)
}

/// Removes what interrupted saves and removals have left.
///
/// # Errors
/// What the operating system refuses.
pub fn clear_unfinished(disk: &dyn Disk, unfinished: &[PathBuf]) -> Result<(), CheckpointError> {
    for folder in unfinished {
        disk.remove_folder(folder).map_err(|e| refused(folder, e))?;
    }
    Ok(())
}

/// Takes a checkpoint's name away before its files, so that none is found in part.
fn discard(disk: &dyn Disk, root: &Path, folder: &Path) -> Result<(), CheckpointError> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let going = root.join(format!("{REMOVING}{name}"));
    let removed = match going.exists() {
        true => disk.remove_folder(&going),
        false => Ok(()),
    };
    removed
        .and_then(|()| disk.rename(folder, &going))
        .and_then(|()| disk.remove_folder(&going))
        .map_err(|e| refused(folder, e))
}

/// Writes the files of a checkpoint; all of it is on the disk afterwards.
fn fill(
    disk: &dyn Disk,
    folder: &Path,
    (header, tensors, state): (&[u8], &[RawTensor<'_>], &[u8]),
) -> Result<(), CheckpointError> {
    disk.create_folder(folder).map_err(|e| refused(folder, e))?;
    let length = (header.len() as u64).to_le_bytes();
    let tensors = tensors.iter().map(|tensor| tensor.bytes);
    let parts = [length.as_slice(), header].into_iter().chain(tensors);
    write_file(disk, &folder.join(TENSORS), parts)?;
    write_file(disk, &folder.join(STATE), [state])?;
    let digest = format!("{}\n", blake3::hash(state));
    write_file(disk, &folder.join(STATE_DIGEST), [digest.as_bytes()])?;
    disk.sync_folder(folder).map_err(|e| refused(folder, e))
}

fn write_file<'a>(
    disk: &dyn Disk,
    path: &Path,
    parts: impl IntoIterator<Item = &'a [u8]>,
) -> Result<(), CheckpointError> {
    let write = || {
        let mut file = disk.create_file(path)?;
        for chunk in parts.into_iter().flat_map(|part| part.chunks(CHUNK_BYTES)) {
            file.write(chunk)?;
        }
        file.sync()
    };
    write().map_err(|e| refused(path, e))
}

fn record(tensor: &RawTensor<'_>) -> TensorRecord {
    TensorRecord {
        name: tensor.name.to_owned(),
        role: tensor.role.to_owned(),
        blake3: blake3::hash(tensor.bytes).to_string(),
    }
}

fn refused(path: &Path, source: io::Error) -> CheckpointError {
    CheckpointError::Write {
        path: path.display().to_string(),
        source,
    }
}
