//! The one test binary: every suite is a module of it.

mod engine;
mod ops;
mod programs;
mod snapshots;
mod tidy;
mod types;
