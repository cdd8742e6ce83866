//! Errors of a device: the CPU's thread pool and its kernels' operands.

use thiserror::Error;

/// A device that cannot be used as asked, or an operand that does not fit a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The operating system gave no thread pool of this size, or the size is zero.
    #[error("cannot start a pool of {threads} threads: {text}")]
    ThreadPool { threads: usize, text: String },
    /// A kernel's operand has another extent than the kernel's other operands ask for.
    #[error("operand {operand}: expected {expected}, found {found}")]
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
}
