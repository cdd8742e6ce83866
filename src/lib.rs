//! bitstep: a training engine whose bits are defined by a written contract.

pub mod error;
pub mod io;
pub mod model;
pub mod num;
pub mod shape;
