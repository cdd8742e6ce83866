//! Goldens: what a recipe's bits are, as a sorted text file, and the comparison with a fresh run.
//!
//! A golden says what it covers and what it does not. A difference is a result: it names the step, the
//! tensor, the op and, where both sides can be computed here, the first index with both values.

pub mod bless;
pub mod compare;
pub mod file;
pub mod flip;
pub mod locate;
pub mod record;
pub mod verify;

pub use compare::{FirstDifference, Verdict};
pub use file::GoldenFile;
