//! The numeric contract in code.
//!
//! Everything that decides a bit stands here, once, and both backends take it from here.

/// The version of the contract. A change of any rule is a new version, named in every golden.
pub const VERSION: u32 = 1;

pub mod lanes;
pub mod philox;
pub mod tree;
pub fn sin_cos(x: f32) -> (f32, f32) {
    (libm::sinf(x), libm::cosf(x))
}
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    libm::expf(x)
}
#[inline(always)]
pub fn log(x: f32) -> f32 {
    libm::logf(x)
}
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + libm::expf(-x))
}
