//! Launches of SwiGLU and its gradient.

use super::call::{CallLaunches, DeviceShape};
use super::rows::{entry, numbers, regions, tiles, vector_entry, vector_width};
use crate::layout::{PlacedCall, Region};
use crate::op::swiglu::{Output, SwiGlu, SwiGluGrad};

/// `a = (g · sigmoid(g)) · u`.
pub fn forward(op: &SwiGlu, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    let operands = [call.reads[0], call.writes[0]];
    let width = vector_width(op.d_ff, op.math, &operands);
    let entry = vector_entry!(width, op.math, "swiglu");
    launch((entry, width), operands, (op.rows, op.d_ff), device)
}

/// The gradients of `g` and `u`, written over them, and the output over its gradient where it is restored.
pub fn grad(op: &SwiGluGrad, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    let operands = match op.output {
        Output::Left => [call.reads[0], call.writes[0]],
        Output::Restored => [call.writes[0], call.writes[1]],
    };
    let width = vector_width(op.d_ff, op.math, &operands);
    let entry = match op.output {
        Output::Left => vector_entry!(width, op.math, "swiglu_grad"),
        Output::Restored => match width {
            1 => entry!(op.math, "swiglu_grad", "_restore"),
            4 => "swiglu_grad_f32_restore_quads",
            _ => entry!(op.math, "swiglu_grad", "_restore_octets"),
        },
    };
    launch((entry, width), operands, (op.rows, op.d_ff), device)
}

/// The entry serves `width` columns a thread.
fn launch(
    (entry, width): (&'static str, usize),
    operands: [Region; 2],
    (rows, d_ff): (usize, usize),
    device: &DeviceShape,
) -> CallLaunches {
    let mut args = regions(operands).to_vec();
    args.extend(numbers([rows, d_ff]));
    tiles(entry, (rows, d_ff / width), device, args)
}
