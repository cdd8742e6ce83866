//! A backbone alone: the caller gives features in place of embedded tokens, and the gradient of what comes out
//! in place of a loss.

use super::head::Reached;
use super::{ParamArenas, PlanConfig};
use crate::error::PlanError;
use crate::grad::GradBuilder;
use crate::grad::recompute::Stretch;
use crate::op::{OpCall, Slot};
use crate::program::ProgramBuilder;
use crate::shape::{DType, Role, TensorSpec};

/// What the caller writes and reads, each [batch · seq_len, width].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Features in, f32.
    pub input: Slot,
    /// The gradient of the features that come out, in the storage of products; with the loss scale where
    /// gradients carry one.
    pub output_grad: Slot,
}

/// What a backbone's programs leave for the caller, each [batch · seq_len, width].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackboneOutputs {
    /// Features out, in the storage of products, of the last step or evaluation.
    pub output: Slot,
    /// The gradient of the features in, f32, of the last step.
    pub input_grad: Slot,
}

/// Declares what the caller writes.
pub(super) fn declare(program: &mut ProgramBuilder, rows: usize, width: usize) -> Features {
    let storage = program.math.storage();
    let mut add = |name: &str, dtype| {
        let spec = TensorSpec::new(name, [rows, width], dtype, Role::Input);
        program.slots.add(spec)
    };
    Features {
        input: add("features", DType::F32),
        output_grad: add("output_grad", storage),
    }
}

/// Appends the backward of `body`, whose end is `output`. Returns what the derivation came to, and what is left for
/// the caller.
pub(super) fn backward(
    program: &mut ProgramBuilder,
    (body, stretches): (&[OpCall], &[Stretch]),
    (features, output): (Features, Slot),
    (arenas, config): (ParamArenas, &PlanConfig),
) -> Result<(Reached, BackboneOutputs), PlanError> {
    let mut grads = GradBuilder::new(program, config.cut(), (arenas.param, arenas.grad));
    grads.share(output, features.output_grad, "backbone")?;
    grads.backward_recomputed(body, stretches)?;
    let input_grad = grads.incoming(features.input, "backbone")?;
    let reached = Reached::of(&grads);
    // What the caller reads after a program has to outlive it.
    for slot in [output, input_grad] {
        program.slots.set_role(slot, Role::Report);
    }
    Ok((reached, BackboneOutputs { output, input_grad }))
}
