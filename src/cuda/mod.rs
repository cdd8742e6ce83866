//! The CUDA backend: the same program from one arena, kernels from committed PTX, one graph a program.

pub mod bias;
pub mod call;
pub mod embed;
pub mod rms_norm;
pub mod rope;
mod rows;
pub mod swiglu;
