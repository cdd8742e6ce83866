//! What a guard found changed before a replay.

use thiserror::Error;

/// A replay that is not admitted.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GuardError {
    /// The arena is not the one the graph was captured in.
    #[error("the graph was captured in arena {expected}, found arena {found}")]
    Arena { expected: u64, found: u64 },
    /// A slot lies elsewhere than at capture.
    #[error("slot table: expected {expected}, found {found}")]
    SlotTable { expected: String, found: String },
    /// The program is not the one that was captured.
    #[error("program: expected manifest {expected}, found {found}")]
    Manifest { expected: String, found: String },
    /// The engine computes under another contract than the graph was captured with.
    #[error("contract version: expected {expected}, found {found}")]
    Contract { expected: u32, found: u32 },
    /// The backend's kernels are not those of the capture.
    #[error("kernels: expected {expected}, found {found}")]
    Kernels { expected: String, found: String },
    /// The loaded modules are not those of the capture.
    #[error("the graph was captured with modules {expected}, found modules {found}")]
    Modules { expected: u64, found: u64 },
    /// The device's stream is not the one the graph was captured on.
    #[error("the graph was captured on stream {expected:#x}, found stream {found:#x}")]
    Stream { expected: u64, found: u64 },
    /// The values of a step would be written elsewhere than the graph reads them.
    #[error("scalar slot: expected {expected}, found {found}")]
    ScalarSlot { expected: String, found: String },
    /// A digest was captured over other bytes.
    #[error("digested regions: expected {expected}, found {found}")]
    DigestRegions { expected: String, found: String },
    /// A hyperparameter that is baked into the program was changed.
    #[error(
        "{name} is baked into the captured program as {expected}, found {found}; thaw the engine to change it"
    )]
    Baked {
        name: &'static str,
        expected: String,
        found: String,
    },
}
