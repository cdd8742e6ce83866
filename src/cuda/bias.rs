//! The launch of a bias gradient.

use super::call::{CallLaunches, DeviceShape};
use super::rows::{Cut, Workspace, entry, no_tokens, numbers, one, regions, vector_width};
use crate::layout::PlacedCall;
use crate::op::bias::BiasGrad;

/// Pieces of a block.
const GROUP: usize = 8;

/// `dbias`: the column sums of `dy`.
pub fn grad(op: &BiasGrad, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    let (dy, dbias) = (call.reads[0], call.writes[0]);
    if op.sum.tokens == 0 {
        return no_tokens(&[dbias]);
    }
    let cut = Cut::new(&op.sum);
    let groups = cut.grains() * cut.pieces().div_ceil(GROUP);
    let width = vector_width(op.n_out, op.math, &[dy]);
    // Single columns make that many times the blocks.
    let many = groups * op.n_out.div_ceil(32 * width) >= device.multiprocessors as usize;
    let (entry, columns) = match (width, many) {
        (4, true) => ("bias_grad_f32_quads", 128),
        (8, true) => (entry!(op.math, "bias_grad", "_octets"), 256),
        _ => (entry!(op.math, "bias_grad", ""), 32),
    };
    let chunks = op.n_out.div_ceil(columns);
    let workspace = Workspace {
        counters: chunks,
        partials: groups * op.n_out,
    };
    let mut args = regions([dy, dbias]).to_vec();
    args.extend(cut.numbers());
    args.extend(numbers([op.n_out]));
    args.extend(workspace.args());
    let launches = one(entry, [groups, chunks], [32, 8], args);
    workspace.with(launches, 0)
}
