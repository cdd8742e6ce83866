//! bitstep: a training engine whose bits are defined by a written contract.

pub mod any_device;
pub mod backend;
pub mod cli;
pub mod cpu;
pub mod cuda;
pub mod data;
pub mod docs;
pub mod engine;
pub mod error;
pub mod golden;
pub mod grad;
pub mod io;
pub mod layout;
pub mod manifest;
pub mod model;
pub mod num;
pub mod op;
pub mod parity;
pub mod plan;
pub mod program;
pub mod report;
pub mod shape;

// A backend that fails on purpose is written once, for the suites outside and for tests in here.
#[cfg(test)]
extern crate self as bitstep;
