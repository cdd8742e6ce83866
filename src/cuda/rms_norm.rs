//! Launches of the RMS norm and its gradient.

use super::call::{Arg, CallLaunches, DeviceShape};
use super::rows::{
    Cut, Workspace, aligned, entry, no_tokens, number, numbers, one, regions, shared_of_two,
};
use crate::layout::{PlacedCall, Region};
use crate::op::Store;
use crate::op::rms_norm::{RmsNorm, RmsNormGrad};
use crate::shape::DType;

/// Rows of a block where a warp serves a row.
const ROWS: usize = 4;

/// How the forward pass holds a row: entries without and with the residual.
fn forward_entry(op: &RmsNorm, operands: &[Region]) -> &'static str {
    let (math, quads) = (op.math, aligned(op.d_model, operands));
    match (quads, op.d_model, op.residual) {
        (false, _, false) => entry!(math, "rms_norm", ""),
        (false, _, true) => entry!(math, "rms_norm", "_residual"),
        (true, 0..=256, false) => entry!(math, "rms_norm", "_quads_256"),
        (true, 0..=256, true) => entry!(math, "rms_norm", "_residual_quads_256"),
        (true, 257..=1024, false) => entry!(math, "rms_norm", "_quads_1024"),
        (true, 257..=1024, true) => entry!(math, "rms_norm", "_residual_quads_1024"),
        (true, _, false) => entry!(math, "rms_norm", "_quads"),
        (true, _, true) => entry!(math, "rms_norm", "_residual_quads"),
    }
}

/// The norm of every row, of `x` or of `x + delta`.
pub fn forward(op: &RmsNorm, call: &PlacedCall, _device: &DeviceShape) -> CallLaunches {
    if op.d_model == 0 {
        return CallLaunches::default();
    }
    let operands: Vec<Region> = call.reads.iter().chain(&call.writes).copied().collect();
    // All but the last, which holds one number a row.
    let entry = forward_entry(op, &operands[..operands.len() - 1]);
    let mut args: Vec<Arg> = operands.into_iter().map(Arg::Region).collect();
    args.extend(numbers([op.rows, op.d_model]));
    args.push(Arg::F32(op.eps));
    one(
        entry,
        [op.rows.div_ceil(ROWS), 1],
        [number(32 * ROWS), 1],
        args,
    )
}

/// The flag of a kernel that writes a copy of the gradient.
const COPY: usize = 2;
/// Pieces up to which the last block folds all of them itself.
const FEW_PIECES: usize = 32;
/// Pieces that the last block of a group folds otherwise.
const GROUP: usize = 16;
/// Warps of a block that reads its rows again from memory.
const WARPS_UNSTAGED: usize = 16;

/// The most warps of a block, each with its row in shared memory, so that two blocks fit.
fn staged_warps(d_model: usize, piece: usize, device: &DeviceShape) -> Option<usize> {
    let wanted = piece.next_power_of_two().clamp(4, 32);
    [32, 16, 8, 4].into_iter().find(|&warps| {
        let fits = staged_bytes(d_model, warps) <= shared_of_two(device);
        warps <= wanted && fits && (warps >= 8 || warps == wanted)
    })
}

/// For each warp two rows, and a row for the chains.
fn staged_bytes(d_model: usize, warps: usize) -> usize {
    (2 * warps + 1) * d_model * 4
}

/// Rows of a block that serves rows alone, beside others that serve this many columns of the weight.
const SPLIT_ROWS: usize = 8;
const SPLIT_COLUMNS: usize = 8;
/// The most pieces, tokens and elements for which these kinds of block are told apart: dh and r are then
/// read twice, from the L2 cache, and a block reads its columns of all tokens.
const SPLIT_PIECES: usize = 256;
const SPLIT_TOKENS: usize = 2048;
const SPLIT_ELEMENTS: usize = 1 << 21;

/// Both gradients of a small call of aligned rows, by blocks that need nothing from each other.
fn grad_split(op: &RmsNormGrad, call: &PlacedCall) -> Option<CallLaunches> {
    let (d, cut) = (op.d_model, Cut::new(&op.sum));
    let wide = op.math.storage() == DType::F32;
    let operands: Vec<Region> = call.reads.iter().chain(&call.writes).copied().collect();
    let small = cut.tokens <= SPLIT_TOKENS && cut.tokens * d <= SPLIT_ELEMENTS;
    let one_tree = cut.grains() == 1 && cut.pieces() <= SPLIT_PIECES;
    // The chains read `rstd` by fours too.
    if !(wide && small && one_tree && aligned(d, &operands) && cut.piece.is_multiple_of(4)) {
        return None;
    }
    let mut args: Vec<Arg> = operands.into_iter().map(Arg::Region).collect();
    let add = usize::from(op.store == Store::Add);
    args.extend(numbers([cut.tokens, cut.piece, d, add]));
    let blocks = d.div_ceil(SPLIT_COLUMNS) + cut.tokens.div_ceil(SPLIT_ROWS);
    let threads = number(32 * SPLIT_ROWS);
    Some(one(
        "rms_norm_grad_f32_split",
        [blocks, 1],
        [threads, 1],
        args,
    ))
}

/// The input gradient of every row and, where it is asked for, the weight gradient. The kernels of narrow
/// activations take what the f32 ones take, and where the copy of the gradient goes.
pub fn grad(op: &RmsNormGrad, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    let (d, math) = (op.d_model, op.math);
    let [dh, r, weight, rstd] = [0, 1, 2, 3].map(|i| call.reads[i]);
    let dr = call.writes[0];
    if d == 0 {
        return CallLaunches::default();
    }
    let mut flags = usize::from(op.store == Store::Add);
    let mut args = regions([dh, r, weight, rstd, dr]).to_vec();
    let mut quads = aligned(d, &[dh, r, weight, dr]);
    if math.storage() != DType::F32 {
        let copy = if op.delta_grad { call.writes[1] } else { dr };
        flags += COPY * usize::from(op.delta_grad);
        quads = quads && aligned(d, &[copy]);
        args.push(Arg::Region(copy));
    }
    if !op.weight_grad {
        let entry = match quads {
            true => entry!(math, "rms_norm_grad", "_rows_quads"),
            false => entry!(math, "rms_norm_grad", "_rows"),
        };
        args.extend(numbers([op.sum.tokens, d, flags]));
        let blocks = op.sum.tokens.div_ceil(ROWS);
        return one(entry, [blocks, 1], [number(32 * ROWS), 1], args);
    }
    let dweight = call.writes[1 + usize::from(op.delta_grad)];
    if op.sum.tokens == 0 {
        return no_tokens(&[dweight]);
    }
    if let Some(launches) = grad_split(op, call) {
        return launches;
    }
    args.push(Arg::Region(dweight));
    weight_grad(op, (quads, flags), args, device)
}

/// The launch with a weight gradient, a block a piece; `args` are its regions.
fn weight_grad(
    op: &RmsNormGrad,
    (quads, flags): (bool, usize),
    mut args: Vec<Arg>,
    device: &DeviceShape,
) -> CallLaunches {
    let (d, math, cut) = (op.d_model, op.math, Cut::new(&op.sum));
    let staged = staged_warps(d, cut.piece, device);
    let entry = match (staged.is_some(), quads) {
        (false, false) => entry!(math, "rms_norm_grad", ""),
        (false, true) => entry!(math, "rms_norm_grad", "_quads"),
        (true, false) => entry!(math, "rms_norm_grad", "_staged"),
        (true, true) => entry!(math, "rms_norm_grad", "_staged_quads"),
    };
    let pieces = cut.grains() * cut.pieces();
    let group = if pieces <= FEW_PIECES { 1 } else { GROUP };
    let workspace = Workspace {
        counters: 1 + cut.grains() * cut.pieces().div_ceil(group),
        partials: pieces * d,
    };
    args.extend(cut.numbers());
    args.extend(numbers([group, d, flags]));
    args.extend(workspace.args());
    let threads = number(32 * staged.unwrap_or(WARPS_UNSTAGED));
    let launches = one(entry, [pieces, 1], [threads, 1], args);
    workspace.with(launches, staged.map_or(0, |warps| staged_bytes(d, warps)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::num::tree::TokenSum;
    use crate::op::OpCall;
    use crate::shape::Math;

    #[test]
    fn rows_are_staged_while_two_blocks_fit() {
        let device = DeviceShape {
            multiprocessors: 132,
            shared_bytes_per_block: 232_448,
            warpgroups: true,
        };
        assert_eq!(staged_warps(128, 32, &device), Some(32));
        assert_eq!(staged_warps(768, 32, &device), Some(16));
        assert_eq!(staged_warps(1024, 32, &device), Some(8));
        assert_eq!(staged_warps(64, 1, &device), Some(4));
        assert_eq!(staged_warps(4096, 32, &device), None);
    }

    /// The kernel of both gradients of a call over `tokens` rows, operands from `start` on.
    fn grad_entry(tokens: usize, d_model: usize, start: usize) -> &'static str {
        let op = RmsNormGrad {
            d_model,
            sum: TokenSum {
                tokens,
                grain: tokens,
                piece: 32,
            },
            store: Store::Assign,
            weight_grad: true,
            delta_grad: false,
            math: Math::F32,
        };
        let region = Region {
            offset: start,
            bytes: 64,
        };
        let call = PlacedCall {
            reads: vec![region; 4],
            writes: vec![region; 2],
            call: OpCall {
                op: op.clone().into(),
                reads: Vec::new(),
                writes: Vec::new(),
            },
        };
        let device = DeviceShape {
            multiprocessors: 132,
            shared_bytes_per_block: 232_448,
            warpgroups: true,
        };
        grad(&op, &call, &device).launches[0].entry
    }

    #[test]
    fn small_gradients_are_split_by_kind_and_large_ones_by_piece() {
        assert_eq!(grad_entry(1024, 128, 0), "rms_norm_grad_f32_split");
        assert_eq!(grad_entry(2048, 1024, 0), "rms_norm_grad_f32_split");
        assert_eq!(grad_entry(1024, 128, 4), "rms_norm_grad_f32_staged");
        assert_eq!(grad_entry(8192, 768, 0), "rms_norm_grad_f32_staged_quads");
        assert_eq!(grad_entry(2048, 1028, 0), "rms_norm_grad_f32_staged_quads");
    }

    #[test]
    fn the_entry_follows_width_alignment_and_precision() {
        let entry = |d_model, offset, residual, math| {
            let op = RmsNorm {
                rows: 1,
                d_model,
                eps: 1e-6,
                residual,
                math,
            };
            forward_entry(&op, &[Region { offset, bytes: 64 }])
        };
        assert_eq!(
            entry(128, 0, true, Math::F32),
            "rms_norm_f32_residual_quads_256"
        );
        assert_eq!(entry(768, 0, false, Math::Tf32), "rms_norm_f32_quads_1024");
        assert_eq!(entry(768, 4, false, Math::F32), "rms_norm_f32");
        assert_eq!(entry(2048, 0, false, Math::Bf16), "rms_norm_bf16_quads");
        assert_eq!(entry(6, 0, true, Math::F16), "rms_norm_f16_residual");
    }
}
