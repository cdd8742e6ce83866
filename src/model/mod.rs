//! Model families: from a configuration to parameters, tensor names and forward calls.

pub mod any;
pub mod config;
pub mod decoder;
pub mod lora;
pub mod mamba;
pub mod mamba_config;
pub mod params;
mod stream;

pub use any::AnyConfig;
pub use config::{Family, ModelConfig};
pub use mamba_config::MambaConfig;

use crate::error::PlanError;
use crate::op::Slot;
use crate::plan::{ParamSlots, StepInputs};
use crate::program::ProgramBuilder;
use crate::shape::Shape;

/// The end of a model's forward calls: what the loss is computed from.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// The last hidden states, [rows, d_model].
    pub hidden: Slot,
    /// The output projection as products read it, [vocab_size, d_model]; that of the embedding table
    /// when tied.
    pub weight: Slot,
    pub vocab_size: usize,
    pub d_model: usize,
}

/// A tensor computed on the host from the configuration, before the first step.
#[derive(Clone, Debug, PartialEq)]
pub struct Derived {
    pub name: &'static str,
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

/// A tensor that a step hands to the next one, f32: the recurrent state of each sequence of the batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CarriedTensor {
    pub name: String,
    /// The first dimension is the batch.
    pub shape: Shape,
}

/// What a model family gives the planner.
pub trait Model {
    /// The parameters, in the order in which they are registered.
    fn parameters(&self) -> Vec<params::ParamGroup>;

    /// The derived tensors for sequences of `seq_len`.
    ///
    /// # Errors
    /// [`PlanError::Size`] for sizes that no op supports, before such a tensor is made.
    fn derived(&self, seq_len: usize) -> Result<Vec<Derived>, PlanError>;

    /// The state that windows of `batch` sequences hand to the next ones; none by default.
    fn carried(&self, _batch: usize) -> Vec<CarriedTensor> {
        Vec::new()
    }

    /// The width of the features that the caller gives in place of tokens; `None` for a model of tokens. A
    /// model of features is a backbone alone: of its [`Head`] only `hidden` is read.
    fn features(&self) -> Option<usize> {
        None
    }

    /// Emits the forward calls up to the last hidden states.
    ///
    /// # Errors
    /// Sizes that an op does not support.
    fn forward(
        &self,
        program: &mut ProgramBuilder,
        params: &ParamSlots,
        inputs: &StepInputs,
    ) -> Result<Head, PlanError>;
}
