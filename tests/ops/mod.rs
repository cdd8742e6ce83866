//! Every op on every backend at hand: its bits against a plain re-implementation of its formula, its
//! gradient against finite differences, and the faults that ops of this kind have had.

mod attention;
mod bits;
mod differences;
mod faults;
mod lora;
mod mamba;
mod mamba_differences;
mod matmul;
mod narrow_loss;
mod reference;
mod reference_mamba;
mod runner;
mod tensor;
mod tensor_attention;
mod tensor_step;
