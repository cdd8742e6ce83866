//! Reading checkpoints: every digest is held against the bytes before anything is used.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{CheckpointState, FORMAT, STATE, STATE_DIGEST, TENSORS, list};
use crate::error::CheckpointError;
use crate::io::tensors::{StoredType, TensorFile};
use crate::io::tensors_header::json_error;
use crate::shape::Shape;

/// A checkpoint in memory, whose bytes are those that were written.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredCheckpoint {
    pub folder: PathBuf,
    pub state: CheckpointState,
    pub tensors: BTreeMap<String, StoredTensor>,
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    pub dtype: StoredType,
    pub shape: Shape,
    /// Row-major, little-endian.
    pub bytes: Vec<u8>,
}

/// What to do about a newest checkpoint that is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenDamaged {
    /// Say so and load none.
    Refuse,
    /// Take the one before.
    UsePrevious,
}

/// The checkpoint to go on from, and what stood in the way.
#[derive(Debug)]
pub struct Found {
    pub checkpoint: StoredCheckpoint,
    /// Newer checkpoints that are damaged, newest first.
    pub damaged: Vec<(PathBuf, CheckpointError)>,
    /// What interrupted saves and removals have left.
    pub unfinished: Vec<PathBuf>,
}

/// Reads the newest whole checkpoint of `root`.
///
/// # Errors
/// [`CheckpointError::NoCheckpoint`]; [`CheckpointError::Damaged`] when the newest is damaged and
/// the one before was not asked for, or when none is left.
pub fn newest(root: &Path, when_damaged: WhenDamaged) -> Result<Found, CheckpointError> {
    let listing = list(root)?;
    let mut damaged = Vec::new();
    for (_, folder) in listing.whole.into_iter().rev() {
        match read(&folder) {
            Ok(checkpoint) => {
                return Ok(Found {
                    checkpoint,
                    damaged,
                    unfinished: listing.unfinished,
                });
            }
            Err(reason) if when_damaged == WhenDamaged::Refuse => {
                return Err(CheckpointError::Damaged {
                    folder: folder.display().to_string(),
                    reason: Box::new(reason),
                });
            }
            Err(reason) => damaged.push((folder, reason)),
        }
    }
    Err(CheckpointError::NoCheckpoint {
        folder: root.display().to_string(),
    })
}

/// Reads a checkpoint and checks every digest of it.
///
/// # Errors
/// [`CheckpointError`] names the file or the tensor that is missing or damaged.
pub fn read(folder: &Path) -> Result<StoredCheckpoint, CheckpointError> {
    let state = read_state(folder)?;
    let path = folder.join(TENSORS);
    let file = TensorFile::open(&path)?;
    let mut tensors = BTreeMap::new();
    for record in &state.tensors {
        let entry = file.entry(&record.name)?;
        let bytes = file.read_bytes(&record.name)?;
        let found = blake3::hash(&bytes);
        if found.to_hex().as_str() != record.blake3 {
            return Err(CheckpointError::TensorDigest {
                file: path.display().to_string(),
                tensor: record.name.clone(),
                expected: record.blake3.clone(),
                found,
            });
        }
        let (dtype, shape) = (entry.dtype, entry.shape.clone());
        let tensor = StoredTensor {
            dtype,
            shape,
            bytes,
        };
        tensors.insert(record.name.clone(), tensor);
    }
    let stray = file.names().filter(|name| !tensors.contains_key(*name));
    let stray: Vec<String> = stray.map(str::to_owned).collect();
    if !stray.is_empty() {
        return Err(CheckpointError::UnexpectedTensors {
            folder: folder.display().to_string(),
            tensors: stray,
        });
    }
    Ok(StoredCheckpoint {
        folder: folder.to_path_buf(),
        state,
        tensors,
    })
}

fn read_state(folder: &Path) -> Result<CheckpointState, CheckpointError> {
    let path = folder.join(STATE);
    let name = path.display().to_string();
    let digest = read_file(&folder.join(STATE_DIGEST))?;
    let text = read_file(&path)?;
    let found = blake3::hash(&text);
    if digest != format!("{found}\n").as_bytes() {
        return Err(CheckpointError::FileDigest {
            file: name,
            expected: String::from_utf8_lossy(&digest).trim_end().to_owned(),
            found,
        });
    }
    // A later form may have other keys, so its number is looked at first.
    let value: serde_json::Value =
        serde_json::from_slice(&text).map_err(|e| json_error(&name, &e))?;
    let format = value.get("format").cloned().unwrap_or_default();
    if format != FORMAT {
        return Err(CheckpointError::OtherRun {
            folder: folder.display().to_string(),
            what: "the form of the checkpoint",
            expected: FORMAT.to_string(),
            found: format.to_string(),
        });
    }
    serde_json::from_value(value).map_err(|e| json_error(&name, &e))
}

fn read_file(path: &Path) -> Result<Vec<u8>, CheckpointError> {
    std::fs::read(path).map_err(|source| CheckpointError::Read {
        path: path.display().to_string(),
        source,
    })
}
