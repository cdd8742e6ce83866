//! Model families: configuration, tensor names and forward calls.

pub mod config;

pub use config::{Family, ModelConfig};
