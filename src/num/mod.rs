//! The numeric contract in code.
//!
//! Everything that decides a bit stands here, once, and both backends take it from here.

/// The version of the contract. A change of any rule is a new version, named in every golden.
pub const VERSION: u32 = 3;

pub mod chain;
pub mod element;
pub mod elementary;
pub mod lanes;
pub mod logits;
pub mod nf4;
pub mod nf4_double;
pub mod normal;
pub mod philox;
pub mod round;
pub mod softmax;
pub mod tensor_model;
pub mod tensor_step;
pub mod tree;
pub mod uniform;

pub use elementary::{
    ACCURACY, Accuracy, LOG2_E, cos, decay, exp, log, narrow_sigmoid, sigmoid, sin, sin_cos,
    softplus, weight,
};
