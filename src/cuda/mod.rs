//! The CUDA backend: the same program from one arena, kernels from committed PTX, one graph a program.

pub mod adamw;
pub mod call;
pub mod clip;
pub mod cross_entropy;
pub mod digest;
pub mod tree_add;
