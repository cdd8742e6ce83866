//! Errors of safetensors files, model folders and checkpoints.

use thiserror::Error;

use super::{ConfigError, ExitCode};
use crate::shape::Shape;

/// A file of tensors or a folder of them that cannot be read or written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The operating system refused to read a file.
    #[error("cannot read {path}: {source}")]
    Read {
        path: String,
        #[source]
        source: std::io::Error,
    },
    /// The operating system refused to write a file.
    #[error("cannot write {path}: {source}")]
    Write {
        path: String,
        #[source]
        source: std::io::Error,
    },
    /// The folder's configuration cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Adapters whose base is neither given nor named by them.
    #[error("{folder} names no base model; give its folder with --model")]
    NoBase { folder: String },
    /// An adapter's configuration asks for what is not done here.
    #[error("{file}: `{key}`: expected {expected}, found {found}")]
    Adapter {
        file: String,
        key: String,
        expected: &'static str,
        found: String,
    },
    /// A quantised weight is not what can be computed with here.
    #[error("{tensor}: `{field}` of its quantisation: expected {expected}, found {found}")]
    Quantisation {
        tensor: String,
        field: &'static str,
        expected: &'static str,
        found: String,
    },
    /// The file ends before the eight bytes that give the header's length.
    #[error(
        "{file}: truncated header: expected at least {expected_bytes} bytes, found {found_bytes}"
    )]
    TruncatedHeader {
        file: String,
        expected_bytes: u64,
        found_bytes: u64,
    },
    /// The header's length reaches beyond the file.
    #[error(
        "{file}: the header claims {header_bytes} bytes, but only {found_bytes} follow its length"
    )]
    HeaderBeyondFile {
        file: String,
        header_bytes: u64,
        found_bytes: u64,
    },
    /// The header is longer than any real one.
    #[error("{file}: the header claims {header_bytes} bytes, more than the limit of {limit_bytes}")]
    HeaderTooLarge {
        file: String,
        header_bytes: u64,
        limit_bytes: u64,
    },
    /// A header or an index is not the JSON it has to be; line and column count from 1.
    #[error("{file}:{line}:{column}: {message}")]
    Json {
        file: String,
        line: usize,
        column: usize,
        message: String,
    },
    /// One name stands for two tensors.
    #[error("{file}: tensor `{tensor}` stands there twice")]
    DuplicateTensor { file: String, tensor: String },
    /// An element type that the format does not define.
    #[error("{file}: tensor `{tensor}` has the unknown element type \"{found}\"")]
    UnknownDtype {
        file: String,
        tensor: String,
        found: String,
    },
    /// A tensor that ends before it starts.
    #[error("{file}: tensor `{tensor}` starts at byte {start} and ends at byte {end}, before it")]
    ReversedOffsets {
        file: String,
        tensor: String,
        start: u64,
        end: u64,
    },
    /// A tensor that reaches beyond the data.
    #[error(
        "{file}: tensor `{tensor}` ends at byte {end} of the data, which has {data_bytes} bytes"
    )]
    OutOfBounds {
        file: String,
        tensor: String,
        end: u64,
        data_bytes: u64,
    },
    /// Shape times element size is not the byte length; `expected_bytes` saturates.
    #[error(
        "{file}: tensor `{tensor}` {shape} of {dtype} takes {expected_bytes} bytes, found {found_bytes}"
    )]
    ByteLength {
        file: String,
        tensor: String,
        shape: Shape,
        dtype: &'static str,
        expected_bytes: u64,
        found_bytes: u64,
    },
    /// Two tensors share bytes.
    #[error(
        "{file}: tensor `{tensor}` overlaps the one before it: expected its start at byte {expected_start}, found {found_start}"
    )]
    Overlap {
        file: String,
        tensor: String,
        expected_start: u64,
        found_start: u64,
    },
    /// Bytes between two tensors belong to neither.
    #[error(
        "{file}: a gap before tensor `{tensor}`: expected its start at byte {expected_start}, found {found_start}"
    )]
    Gap {
        file: String,
        tensor: String,
        expected_start: u64,
        found_start: u64,
    },
    /// Bytes after the last tensor.
    #[error("{file}: the tensors take {expected_bytes} bytes of data, found {found_bytes}")]
    TrailingBytes {
        file: String,
        expected_bytes: u64,
        found_bytes: u64,
    },
    /// A tensor that has to be there is not.
    #[error("{file}: missing tensor `{tensor}`")]
    MissingTensor { file: String, tensor: String },
    /// A tensor of an element type the reader does not take.
    #[error("{file}: tensor `{tensor}`: expected {expected}, found {found}")]
    WrongDtype {
        file: String,
        tensor: String,
        expected: &'static str,
        found: &'static str,
    },
    /// A tensor of another shape.
    #[error("{file}: tensor `{tensor}`: expected shape {expected}, found {found}")]
    WrongShape {
        file: String,
        tensor: String,
        expected: Shape,
        found: Shape,
    },
    /// A tensor to be written has more or fewer values than its shape.
    #[error(
        "{file}: tensor `{tensor}` {shape} to be written: expected {expected_values} values, found {found_values}"
    )]
    ValueCount {
        file: String,
        tensor: String,
        shape: Shape,
        expected_values: u64,
        found_values: u64,
    },
    /// A model folder without weights.
    #[error("{folder}: expected model.safetensors or model.safetensors.index.json, found neither")]
    NoWeights { folder: String },
    /// An index that leads out of its folder.
    #[error(
        "{file}: tensor `{tensor}`: expected the name of a file in the same folder, found \"{found}\""
    )]
    ShardName {
        file: String,
        tensor: String,
        found: String,
    },
    /// A shard holds a tensor that the index does not place there.
    #[error("{file}: the index does not place tensor `{tensor}` in {shard}, which holds it")]
    NotInIndex {
        file: String,
        tensor: String,
        shard: String,
    },
    /// Tensors that no part of the model uses.
    #[error("{folder}: tensors that the model has no place for: {}", tensors.join(", "))]
    UnexpectedTensors {
        folder: String,
        tensors: Vec<String>,
    },
    /// Weights declared as tied are not the same.
    #[error("{file}: `{tensor}` is tied to `{tied_to}` but differs at element {index}: expected {expected:?} ({:#010x}), found {found:?} ({:#010x})", expected.to_bits(), found.to_bits())]
    TiedDiffers {
        file: String,
        tensor: String,
        tied_to: String,
        index: usize,
        expected: f32,
        found: f32,
    },
    /// A run's folder without a checkpoint.
    #[error("{folder} holds no complete checkpoint to resume from")]
    NoCheckpoint { folder: String },
    /// A file of a checkpoint does not have the bytes that were written.
    #[error("{file}: expected BLAKE3 {expected}, found {found}: the file is damaged")]
    FileDigest {
        file: String,
        expected: String,
        found: blake3::Hash,
    },
    /// A tensor of a checkpoint does not have the bytes that were written.
    #[error("{file}: tensor `{tensor}`: expected BLAKE3 {expected}, found {found}: it is damaged")]
    TensorDigest {
        file: String,
        tensor: String,
        expected: String,
        found: blake3::Hash,
    },
    /// A checkpoint lacks a tensor that the run needs to go on.
    #[error(
        "{folder}: no {role} tensor `{tensor}`: without it the run would go on with other bits"
    )]
    StateMissing {
        folder: String,
        role: &'static str,
        tensor: String,
    },
    /// The newest checkpoint is damaged and the one before was not asked for.
    #[error(
        "the newest checkpoint is damaged: {reason}. --resume-previous sets {folder} aside and goes on from the one before"
    )]
    Damaged {
        folder: String,
        reason: Box<CheckpointError>,
    },
    /// A checkpoint of another run, contract, domain or data.
    #[error("{folder} does not fit this run: {what}: expected {expected}, found {found}")]
    OtherRun {
        folder: String,
        what: &'static str,
        expected: String,
        found: String,
    },
    /// The thread that writes checkpoints has ended without an answer.
    #[error("the thread that writes {folder} has panicked; the checkpoints before it stand")]
    WriterPanicked { folder: String },
    /// A tokenizer file whose name the model folder uses itself, or that has no name.
    #[error("{path}: cannot be copied into a model folder under this name")]
    TokenizerName { path: String },
}

impl CheckpointError {
    /// The exit code of the command line for this error.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::Data
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_error_is_a_data_error_even_when_the_configuration_is_at_fault() {
        let config = ConfigError::NoModel {
            file: "c".to_string(),
        };
        assert_eq!(config.exit_code().code(), 2);
        assert_eq!(CheckpointError::from(config).exit_code().code(), 4);
    }
}
