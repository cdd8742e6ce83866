//! The CUDA backend: the same program from one arena, kernels from committed PTX, one graph a program.

pub mod arena;
pub mod call;
pub mod device;
pub mod gemm;
pub mod graph;
mod launch;
pub mod module;
pub mod ptx;
