//! Launches of SwiGLU and its gradient.

use super::call::{CallLaunches, DeviceShape};
use super::rows::{aligned, numbers, regions, tiles};
use crate::layout::{PlacedCall, Region};
use crate::op::swiglu::{SwiGlu, SwiGluGrad};

/// `a = (g · sigmoid(g)) · u`.
pub fn forward(op: &SwiGlu, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    let entries = ["swiglu_f32", "swiglu_f32_quads"];
    let operands = [call.reads[0], call.writes[0]];
    launch(entries, operands, (op.rows, op.d_ff), device)
}

/// The gradients of `g` and `u`, written over them.
pub fn grad(op: &SwiGluGrad, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    let entries = ["swiglu_grad_f32", "swiglu_grad_f32_quads"];
    let operands = [call.reads[0], call.writes[0]];
    launch(entries, operands, (op.rows, op.d_ff), device)
}

/// The first entry serves single columns, the second quads.
fn launch(
    entries: [&'static str; 2],
    operands: [Region; 2],
    (rows, d_ff): (usize, usize),
    device: &DeviceShape,
) -> CallLaunches {
    let mut args = regions(operands).to_vec();
    args.extend(numbers([rows, d_ff]));
    match aligned(d_ff, &operands) {
        true => tiles(entries[1], (rows, d_ff / 4), device, args),
        false => tiles(entries[0], (rows, d_ff), device, args),
    }
}
