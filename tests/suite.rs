//! The one test binary: every suite is a module of it.

mod cli;
mod engine;
mod fuzz;
mod gpu;
mod lanes;
mod ops;
mod programs;
mod ptx;
mod snapshots;
mod tidy;
mod types;
