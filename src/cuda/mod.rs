//! The CUDA backend: the same program from one arena, kernels from committed PTX, one graph a program.

pub mod call;
pub mod matmul;
