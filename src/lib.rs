//! bitstep: a training engine whose bits are defined by a written contract.

pub mod data;
pub mod error;
pub mod num;
pub mod shape;
