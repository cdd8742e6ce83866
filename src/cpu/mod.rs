//! The CPU backend: the executable form of the numeric contract.

pub mod adamw;
pub mod arena;
pub mod attention;
mod attention_block;
mod attention_grad;
mod attention_tensor;
pub mod backend;
pub mod bias;
pub mod carry_state;
pub mod clip;
pub mod context;
pub mod conv1d;
pub mod copy;
pub mod cross_entropy;
mod cross_entropy_narrow;
pub mod embed;
pub mod gemm;
mod gemm_block;
mod gemm_pack;
pub mod lora;
pub mod matmul;
mod narrow;
pub mod nf4;
pub mod peak;
pub mod rms_norm;
pub mod rope;
pub mod rows;
pub mod scan;
mod scan_grad;
pub mod simd;
mod simd_path;
pub mod split_columns;
pub mod swiglu;
mod tensor_block;
pub mod tensor_gemm;
mod tensor_tile;
#[cfg(target_arch = "x86_64")]
mod tensor_x86;
pub mod tree_add;

pub use backend::CpuBackend;
