//! The CUDA backend: the same program from one arena, kernels from committed PTX, one graph a program.

pub mod adamw;
pub mod arena;
pub mod attention;
mod attention_tensor;
pub mod backend;
mod bandwidth;
pub mod bias;
pub mod call;
pub mod clip;
pub mod cross_entropy;
pub mod device;
pub mod digest;
pub mod embed;
pub mod gemm;
pub mod graph;
pub mod identity;
pub mod issue;
mod launch;
pub mod lora;
pub mod matmul;
mod matmul_tensor;
pub mod module;
pub mod nf4;
mod pieces;
pub mod precision;
pub mod probe;
pub mod probe_cases;
pub mod products;
pub mod ptx;
pub mod rms_norm;
pub mod rope;
mod rows;
pub mod swiglu;
pub mod tree_add;

pub use backend::CudaBackend;
pub use bandwidth::copy_bandwidth;
