//! Errors of recording and capturing a step.

use thiserror::Error;

use super::{DeviceError, PlanError};

/// A step that cannot be recorded, captured or proven.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum CaptureError {
    /// Too few eager steps were taken before recording.
    #[error("recording needs {expected} eager warm-up steps, found {found}")]
    TooFewWarmupSteps { expected: u32, found: u32 },
    /// Two warm-up steps issued different calls.
    #[error(
        "the calls of two warm-up steps differ first at call {call}: expected {expected}, found {found}"
    )]
    Unstable {
        call: usize,
        expected: String,
        found: String,
    },
    /// The calls issued are not the planned ones.
    #[error(
        "the calls issued differ from the plan first at call {call}: expected {expected}, found {found}"
    )]
    NotThePlan {
        call: usize,
        expected: String,
        found: String,
    },
    /// A graph would allocate or free memory while it runs.
    #[error("the captured graph has {found} memory nodes, expected none")]
    MemoryNodes { found: usize },
    /// The captured graph has another number of kernels than were launched.
    #[error("the captured graph has {found} kernel nodes, expected {expected}")]
    Nodes { expected: usize, found: usize },
    /// What waits for what in the graph is not what it should be.
    #[error("kernel node {to} of the graph should{} wait for kernel node {from}", if *.planned { "" } else { " not" })]
    Edge {
        from: usize,
        to: usize,
        /// Whether the wait is lacking, and not one too many.
        planned: bool,
    },
    /// A kernel node is not what was launched.
    #[error("kernel node {node} ({kernel}): expected {expected}, found {found}")]
    Node {
        node: usize,
        kernel: String,
        expected: String,
        found: String,
    },
    /// A call reaches outside the arena.
    #[error("call {call}: {source}")]
    Call {
        call: usize,
        #[source]
        source: DeviceError,
    },
    /// Replay gave other bits than the eager step.
    #[error(
        "replay differs from the eager step in tensor {tensor}: expected digest {expected}, found {found}; the engine is back at the bits before the proof"
    )]
    NotEqual {
        tensor: String,
        expected: String,
        found: String,
    },
    /// The captured digest of a parameter is not the digest of its bytes.
    #[error("the captured digest of tensor {tensor} is {found}, expected {expected}")]
    Digest {
        tensor: String,
        expected: String,
        found: String,
    },
    /// The proof step was dropped, so equal weights would prove nothing.
    #[error("the proof step was dropped ({reason}); a proof needs a step that is applied")]
    ProofStepDropped { reason: String },
    /// The batch or a hyperparameter of the proof step does not fit the program.
    #[error("the proof step is refused: {text}")]
    ProofBatch { text: String },
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The plan does not hold.
    #[error(transparent)]
    Plan(#[from] PlanError),
}
