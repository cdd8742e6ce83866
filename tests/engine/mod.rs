//! The engine on the CPU: transitions, refusals, proofs, faults, and what a step may not depend on.

mod adapters;
mod attention;
mod budget;
mod common;
mod digests;
mod faults;
mod faulty;
mod forms;
mod gpu;
mod halves;
mod independence;
mod lockstep;
mod mamba;
mod passes;
mod policy;
mod precision;
mod products;
mod recompute;
mod restored;
mod states;
mod steps;
mod timing;
mod updates;
mod values;
