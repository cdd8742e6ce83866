//! The engine on the CPU: transitions, refusals, proofs, faults, and what a step may not depend on.

mod common;
mod digests;
mod faults;
mod faulty;
mod gpu;
mod independence;
mod lockstep;
mod mamba;
mod precision;
mod states;
mod steps;
mod timing;
mod updates;
