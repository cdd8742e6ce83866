//! Errors of one training step.

use thiserror::Error;

use super::{CaptureError, DataError, DeviceError, GuardError};

/// A step that did not happen. Nothing has moved: no weight, no counter, no cursor.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StepError {
    /// The batch does not fit the program.
    #[error(transparent)]
    Batch(#[from] DataError),
    /// A hyperparameter of the step is not a usable number.
    #[error("{name}: expected {expected}, found {found}")]
    Hyperparameter {
        name: &'static str,
        expected: &'static str,
        found: f64,
    },
    /// A guard did not admit the replay.
    #[error("replay refused: {0}")]
    Guard(#[from] GuardError),
    /// The device failed; the engine is poisoned from here on.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The engine is captured but not proven, so it cannot step.
    #[error("the engine is {state}: expected warm-up or replaying")]
    NotSteppable { state: &'static str },
    /// Recording, capture or proof of the step failed.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// No parameter has this name.
    #[error("no tensor is named {name}; the nearest is {nearest}")]
    UnknownTensor { name: String, nearest: String },
    /// The values given for a tensor are not as many as it has elements.
    #[error("tensor {name}: expected {expected} elements, found {found}")]
    TensorSize {
        name: String,
        expected: usize,
        found: usize,
    },
    /// A step as one program while passes wait for their update.
    #[error(
        "an accumulation window is open with {passes} passes: expected the pass that updates, found a step of its own"
    )]
    WindowOpen { passes: u64 },
    /// A pass over another batch than the one whose passes wait for their update.
    #[error(
        "an accumulation window is open with {passes} passes over batch {expected}, found batch {found}"
    )]
    OtherBatch {
        passes: u64,
        expected: String,
        found: String,
    },
    /// A pass whose losses would be divided by another number than those before it in its window.
    #[error("the open accumulation window has the loss normaliser {expected}, found {found}")]
    OtherNormaliser { expected: f64, found: f64 },
    /// More passes than the plan has partial sums for.
    #[error("the accumulation window is full: the plan combines at most {most} passes")]
    WindowFull { most: u64 },
    /// The plan has no such program.
    #[error("the plan has no program `{program}`: a plan in halves has forward and backward")]
    NoProgram { program: String },
    /// Backward has nothing to start from.
    #[error(
        "backward needs the activations of a forward half; none stand there, or another program has run since"
    )]
    NoForward,
    /// A pass that is only accumulated makes no update, so nothing is clipped or skipped.
    #[error(
        "{option} belongs to the update: expected none with an accumulated pass, found {found}"
    )]
    AccumulateOnly { option: &'static str, found: f64 },
    /// A pass that is only accumulated would hand on no state.
    #[error(
        "the model hands states from step to step: expected passes that are updates, found an accumulated one"
    )]
    CarriedPass,
    /// The model hands no state from step to step.
    #[error("the model carries no recurrent state from step to step")]
    NoState,
    /// The model reads tokens and has a loss of its own.
    #[error("the model reads tokens: features go into a backbone alone")]
    NoFeatures,
    /// An element is asked for that the tensor does not have.
    #[error("tensor {name} has {elements} elements, expected an index below that, found {found}")]
    ElementIndex {
        name: String,
        elements: usize,
        found: usize,
    },
}
