//! Errors of a device: the CPU's thread pool, a GPU's driver, operands that do not fit.

use thiserror::Error;

/// A device that cannot do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The thread pool could not be built.
    #[error("cannot start {threads} threads: {text}")]
    ThreadPool { threads: usize, text: String },
    /// An operand's size is not what the op's sizes ask for.
    #[error("operand {operand}: expected {expected} elements, found {found}")]
    OperandSize {
        operand: &'static str,
        expected: usize,
        found: usize,
    },
    /// No SIMD path has this name.
    #[error("unknown SIMD path {found:?}: expected scalar, avx2 or avx512")]
    UnknownSimdPath { found: String },
    /// The SIMD path exists, but this processor does not have it.
    #[error("SIMD path {wanted} is not available: this processor has {detected}")]
    SimdPathUnavailable {
        wanted: &'static str,
        detected: &'static str,
    },
    /// An op asked for an operand that its call does not have.
    #[error("{op}: operand {index} is missing or was taken twice")]
    OperandMissing { op: &'static str, index: usize },
    /// The bytes of an operand cannot be read as its element type.
    #[error("{op}: operand {index} lies at a byte offset that does not fit its element type")]
    OperandAlignment { op: &'static str, index: usize },
    /// A region reaches beyond the arena.
    #[error("region {offset}..{end} reaches beyond the arena of {arena_bytes} bytes")]
    OutOfArena {
        offset: usize,
        end: usize,
        arena_bytes: usize,
    },
    /// Two operands of one call overlap and one of them is written.
    #[error("two operands of one call overlap at byte {offset} of the arena")]
    Overlap { offset: usize },
    /// A transfer's length is not its region's.
    #[error("transfer of {found} bytes to or from a region of {expected} bytes")]
    TransferSize { expected: usize, found: usize },
    /// The arena does not fit into memory.
    #[error(
        "the arena needs {needed_bytes} bytes, which the system refuses; lower data.batch, data.seq_len or the model's size"
    )]
    OutOfMemory { needed_bytes: usize },
    /// A token id is outside the table.
    #[error("token id {found} at position {position}: expected 0..{vocab_size}")]
    TokenOutOfRange {
        position: usize,
        found: i32,
        vocab_size: usize,
    },
    /// An earlier fault left the device in an unknown state.
    #[error("the engine is poisoned by an earlier fault: {first}")]
    Poisoned { first: String },
    /// No device of this kind is here, or this build cannot use it.
    #[error("device {device} is not available: {reason}")]
    Unavailable { device: String, reason: String },
    /// The driver failed.
    #[error("{call} failed on {device}: {text}")]
    Driver {
        device: String,
        call: &'static str,
        text: String,
    },
}
