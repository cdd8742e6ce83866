//! Any error of the crate, for callers that run the whole of it, with the exit code it means.

use thiserror::Error;

use super::{
    CaptureError, CheckpointError, ConfigError, DataError, DeviceError, ExitCode, GoldenError,
    ParityError, PlanError, RunError, StepError,
};

/// Any error of the crate.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Capture(#[from] CaptureError),
    #[error(transparent)]
    Step(#[from] StepError),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(transparent)]
    Golden(#[from] GoldenError),
    #[error(transparent)]
    Parity(#[from] ParityError),
}

impl Error {
    /// The exit code of a process that ends with this error.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Error::Config(_) | Error::Plan(_) => ExitCode::Usage,
            Error::Data(_) | Error::Checkpoint(_) | Error::Parity(_) => ExitCode::Data,
            Error::Device(
                DeviceError::ThreadPool { .. }
                | DeviceError::UnknownSimdPath { .. }
                | DeviceError::UnknownGemm { .. }
                | DeviceError::DevicePair { .. }
                | DeviceError::UnknownDevice { .. },
            ) => ExitCode::Usage,
            Error::Device(_) | Error::Capture(_) => ExitCode::Device,
            Error::Step(StepError::Batch(_)) => ExitCode::Data,
            Error::Step(
                StepError::Hyperparameter { .. }
                | StepError::UnknownTensor { .. }
                | StepError::ElementIndex { .. },
            ) => ExitCode::Usage,
            Error::Step(_) => ExitCode::Device,
            Error::Run(run) => run.exit_code(),
            Error::Golden(golden) => match golden {
                GoldenError::RefusedInCi
                | GoldenError::NoReason
                | GoldenError::TraceTooLong { .. }
                | GoldenError::FlipText { .. }
                | GoldenError::FlipStep { .. }
                | GoldenError::DifferentKinds { .. } => ExitCode::Usage,
                GoldenError::Unprovable { .. } => ExitCode::Device,
                _ => ExitCode::Data,
            },
        }
    }
}
