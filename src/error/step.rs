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
