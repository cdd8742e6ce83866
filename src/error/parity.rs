//! Errors of a recorded reference run.

use thiserror::Error;

use super::CheckpointError;

/// A folder with a recorded run that cannot be held against a run here.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ParityError {
    /// The operating system refused to read a file.
    #[error("cannot read {path}: {source}")]
    Read {
        path: String,
        #[source]
        source: std::io::Error,
    },
    /// `reference.json` is not the JSON it has to be; line and column count from 1.
    #[error("{file}:{line}:{column}: {message}")]
    Json {
        file: String,
        line: usize,
        column: usize,
        message: String,
    },
    /// The record trains adapters and does not have them.
    #[error(
        "{folder} is the record of adapters over a frozen base, but has no folder `adapter` with them beside the base in `base`"
    )]
    Adapters { folder: String },
    /// A size is zero.
    #[error("{file}: `{field}` is 0, expected at least 1: nothing would be compared")]
    Empty { file: String, field: &'static str },
    /// A list has more or fewer entries than steps.
    #[error("{file}: `{field}` has {found} entries, expected one a step, {expected}")]
    Count {
        file: String,
        field: &'static str,
        expected: usize,
        found: usize,
    },
    /// The record trains a tensor that the model does not have.
    #[error("{file}: `trainable` names `{tensor}`, which the model does not have")]
    UnknownTrainable { file: String, tensor: String },
    /// The record does not train a parameter.
    #[error(
        "{file}: `trainable` leaves out `{tensor}`; this version trains every parameter of a model"
    )]
    Frozen { file: String, tensor: String },
    /// A file of tensors or the model folder cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}
