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
    /// No device has a name of this form.
    #[error("unknown device {found:?}: expected auto, cpu or cuda:N")]
    UnknownDevice { found: String },
    /// The text of a pair of devices is not what `--devices` takes.
    #[error(
        "devices {found:?}: expected two of cpu, cpu:scalar, cpu:avx2, cpu:avx512 and cuda:N with a comma between them, such as cpu,cuda:0"
    )]
    DevicePair { found: String },
    /// No choice of providers of matrix products has this name.
    #[error("unknown choice of matrix products {found:?}: expected own or auto")]
    UnknownGemm { found: String },
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
    /// The CUDA driver library is not installed.
    #[error("no CUDA driver: libcuda was not found; use --device cpu, or install an NVIDIA driver")]
    NoDriver,
    /// The driver is older than the kernels need.
    #[error(
        "the CUDA driver supports CUDA {found_major}.{found_minor}, expected 12.4 or newer (driver 550); update the driver or use --device cpu"
    )]
    DriverTooOld { found_major: i32, found_minor: i32 },
    /// There is no device of this number.
    #[error(
        "cuda:{wanted} does not exist: {found} CUDA devices are visible; use --device cuda:0 or cpu"
    )]
    NoDevice { wanted: usize, found: usize },
    /// The device is older than the kernels need.
    #[error(
        "{device} has compute capability {found_major}.{found_minor}, expected 8.0 or newer; use --device cpu"
    )]
    Architecture {
        device: String,
        found_major: i32,
        found_minor: i32,
    },
    /// The arena does not fit into the device's memory.
    #[error(
        "the arena needs {needed_bytes} bytes and {device} has {free_bytes} of {total_bytes} free; lower data.batch, data.seq_len or the model's size"
    )]
    DeviceMemory {
        device: String,
        needed_bytes: usize,
        free_bytes: usize,
        total_bytes: usize,
    },
    /// A plan needs more memory than the device has free.
    #[error(
        "the plan needs {needed_bytes} bytes ({state_bytes} of parameters, gradients, moments and inputs, {local_bytes} of activations, {workspace_bytes} of workspace) and {device} has {free_bytes} of {total_bytes} free; lower {lower}"
    )]
    PlanTooLarge {
        device: String,
        needed_bytes: usize,
        state_bytes: usize,
        local_bytes: usize,
        workspace_bytes: usize,
        free_bytes: usize,
        total_bytes: usize,
        lower: &'static str,
    },
    /// A device's digests say that two tensors differ, and their bytes say that they do not.
    #[error(
        "the digests of {tensor} differ between {left} and {right} and its bytes do not: one of the devices computes wrong digests"
    )]
    Digest {
        tensor: String,
        left: String,
        right: String,
    },
    /// No committed module holds a kernel of this name.
    #[error("no kernel is named {entry}; this build's ptx folder does not fit its code")]
    NoKernel { entry: String },
    /// This kind of device has no kernels for an op.
    #[error("{op} has no CUDA kernel yet; use --device cpu")]
    NoCudaOp { op: &'static str },
    /// This kind of device has no kernels for an op in this precision.
    #[error("{op} has no CUDA kernel in {precision} yet; use --device cpu, or --set precision=f32")]
    NoPrecision {
        op: &'static str,
        precision: &'static str,
    },
    /// The driver failed.
    #[error("{call} failed on {device}: {text}")]
    Driver {
        device: String,
        call: &'static str,
        text: String,
    },
}
