//! The CPU backend: the executable form of the numeric contract.

pub mod context;
pub mod gemm;
mod gemm_block;
mod gemm_pack;
pub mod peak;
pub mod simd;
mod simd_path;
