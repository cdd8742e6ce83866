//! The errors of the crate: one enum a concern, each variant with what was expected and what was found.
//!
//! A `String` in a variant holds a name (a tensor, a key, a path) or text that came from the
//! operating system or a driver; every other fact is a field of its own type.

mod checkpoint;
mod config;
mod data;
mod exit;

pub use checkpoint::CheckpointError;
pub use config::{ConfigError, Expected, Found};
pub use data::DataError;
pub use exit::ExitCode;
