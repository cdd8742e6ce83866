//! The long documents: how the engine is built, what its numbers are, and how goldens and recipes are used.

#[doc = include_str!("architecture.md")]
pub mod architecture {}

#[doc = include_str!("checkpoints.md")]
pub mod checkpoints {}

#[doc = include_str!("ci.md")]
pub mod ci {}

#[doc = include_str!("contract.md")]
pub mod contract {}

#[doc = include_str!("cuda.md")]
pub mod cuda {}

#[doc = include_str!("goldens.md")]
pub mod goldens {}

#[doc = include_str!("recipes.md")]
pub mod recipes {}

#[doc = include_str!("reports.md")]
pub mod reports {}

#[doc = include_str!("faults.md")]
pub mod faults {}

#[doc = include_str!("pitfalls.md")]
pub mod pitfalls {}

#[doc = include_str!("steps.md")]
pub mod steps {}

/// The examples of the README are tests.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
