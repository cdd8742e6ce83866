//! The one test binary: every suite is a module of it.

mod cli;
mod engine;
mod ops;
mod programs;
mod snapshots;
mod tidy;
mod types;
