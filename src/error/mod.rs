//! The errors of the crate: one enum a concern, each variant with what was expected and what was found.
//!
//! A `String` in a variant holds a name (a tensor, a key, a path) or text that came from the
//! operating system or a driver; every other fact is a field of its own type.

mod any;
mod capture;
mod checkpoint;
mod config;
mod data;
mod device;
mod exit;
mod golden;
mod guard;
mod parity;
mod plan;
mod run;
mod step;

pub use any::Error;
pub use capture::CaptureError;
pub use checkpoint::CheckpointError;
pub use config::{ConfigError, Expected, Found};
pub use data::DataError;
pub use device::DeviceError;
pub use exit::ExitCode;
pub use golden::GoldenError;
pub use guard::GuardError;
pub use parity::ParityError;
pub use plan::PlanError;
pub use run::RunError;
pub use step::StepError;
