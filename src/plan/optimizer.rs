//! The end of a step: norm, clip, AdamW and the state that goes on.

use super::place::Placed;
use super::{PlanConfig, StepInputs, StepOutputs};
use crate::op::adamw::AdamW;
use crate::op::carry_state::CarryState;
use crate::op::clip::{Clip, GradSquares, LossScaling};
use crate::program::ProgramBuilder;
use crate::shape::{DType, Role, TensorSpec};

/// The norm over the whole gradient arena, the clip decision, and one AdamW call.
pub(super) fn append(
    program: &mut ProgramBuilder,
    placed: &Placed,
    config: &PlanConfig,
    (inputs, outputs): (&StepInputs, StepOutputs),
) {
    let arenas = placed.arenas;
    let elements = program.slots.spec(arenas.param).shape.elements();
    let squares = GradSquares { elements };
    let partials = squares.partials();
    let spec = TensorSpec::new("grad_squares", [partials], DType::F64, Role::Scratch);
    let sums = program.slots.add(spec);
    program.call(squares, vec![arenas.grad], vec![sums]);
    let reads = vec![sums, outputs.loss, inputs.scalars];
    let loss_scaling = inputs.loss_scale.map(|_| LossScaling {
        growth_interval: config.growth_interval,
    });
    let clip = Clip {
        partials,
        loss_scaling,
    };
    let mut writes = vec![outputs.report];
    writes.extend(inputs.loss_scale);
    program.call(clip, reads, writes);
    let [before_shadow, after_shadow] = arenas.shadow.map_or([0, 0], |shadow| {
        let shadowed = program.slots.spec(shadow.slot).shape.elements();
        [shadow.first, elements - shadow.first - shadowed]
    });
    let adamw = AdamW {
        elements,
        decayed: placed.decayed,
        beta1: config.beta1 as f32,
        one_minus_beta1: (1.0 - config.beta1) as f32,
        beta2: config.beta2 as f32,
        one_minus_beta2: (1.0 - config.beta2) as f32,
        eps: config.eps as f32,
        before_shadow,
        after_shadow,
        math: config.math,
    };
    let mut writes = vec![arenas.param, arenas.moment1, arenas.moment2];
    writes.extend(arenas.shadow.map(|shadow| shadow.slot));
    program.call(
        adamw,
        vec![arenas.grad, inputs.scalars, outputs.report],
        writes,
    );
    if let Some(carried) = &inputs.carried {
        let elements = program.slots.spec(carried.state).shape.elements();
        program.call(
            CarryState { elements },
            vec![carried.next, outputs.report],
            vec![carried.state],
        );
    }
}
