//! Launches of the rotary position embedding, alone or fused with the norms of the heads.

use super::call::{Arg, CallLaunches, DeviceShape};
use super::rows::{
    Cut, Workspace, entry, no_tokens, number, numbers, one, regions, shared_of_one, shared_of_two,
    tiles, vector_entry, vector_width,
};
use crate::layout::{PlacedCall, Region};
use crate::op::rope::{Heads, QkNormRope, QkNormRopeGrad, Rope, RopeGrad};
use crate::shape::{DType, Math};

/// Heads of a block where a warp serves a head of a row.
const HEADS: usize = 8;

/// Rotates queries and keys in place.
pub fn forward(op: &Rope, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    let operands = [call.reads[0], call.writes[0]];
    let width = pairs_a_thread(&op.heads, op.math, &operands);
    let entry = vector_entry!(width, op.math, "rope");
    let shape = (op.rows, op.seq_len, op.heads);
    turn((entry, width), operands, shape, device)
}

/// Rotates the gradients of queries and keys back in place.
pub fn grad(op: &RopeGrad, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    let operands = [call.reads[0], call.writes[0]];
    let width = pairs_a_thread(&op.heads, op.math, &operands);
    let entry = vector_entry!(width, op.math, "rope_grad");
    let shape = (op.rows, op.seq_len, op.heads);
    turn((entry, width), operands, shape, device)
}

/// Pairs that fill 16 bytes twice, if all heads can be read so; else 1.
fn pairs_a_thread(heads: &Heads, math: Math, operands: &[Region; 2]) -> usize {
    match heads.head_dim.is_multiple_of(2) {
        true => vector_width(heads.head_dim / 2, math, operands),
        false => 1,
    }
}

/// Heads that a thread rotates, one after another with the same angles; the kernel's own constant.
const HEADS_A_THREAD: usize = 4;

/// The entry serves `width` pairs of each of its heads a thread.
fn turn(
    (entry, width): (&'static str, usize),
    operands: [Region; 2],
    (rows, seq_len, heads): (usize, usize, Heads),
    device: &DeviceShape,
) -> CallLaunches {
    let mut args = regions(operands).to_vec();
    args.extend(numbers([
        rows,
        seq_len.max(1),
        heads.rotated(),
        heads.head_dim,
        heads.columns(),
    ]));
    let pairs = heads.rotated().div_ceil(HEADS_A_THREAD) * (heads.head_dim / 2);
    tiles(entry, (rows, pairs / width), device, args)
}

/// Threads of a block where a warp or a smaller group of threads serves a head of a row.
const BLOCK: usize = 32 * HEADS;

/// Threads that serve a narrow head of one of the common sizes, 8 columns each; `None` for other heads, and
/// where the operands cannot be read by 16 bytes.
fn group(heads: &Heads, math: Math, operands: &[Region]) -> Option<usize> {
    let whole = operands.iter().all(|r| r.offset.is_multiple_of(16));
    let common = [32, 64, 128, 256].contains(&heads.head_dim);
    (whole && common && math.storage() != DType::F32).then_some(heads.head_dim / 8)
}

/// The norm and the rotation of every query and key head.
pub fn norm_forward(op: &QkNormRope, call: &PlacedCall, _device: &DeviceShape) -> CallLaunches {
    let (heads, math) = (op.heads, op.math);
    let operands: Vec<Region> = call
        .reads
        .iter()
        .chain(&call.writes[..1])
        .copied()
        .collect();
    let group = group(&heads, math, &operands);
    let entry = match (group, math.storage(), heads.head_dim) {
        (Some(4), ..) => entry!(math, "qk_norm_rope", "_32"),
        (Some(8), ..) | (_, DType::F32, 64) => entry!(math, "qk_norm_rope", "_64"),
        (Some(16), ..) | (_, DType::F32, 128) => entry!(math, "qk_norm_rope", "_128"),
        (Some(32), ..) | (_, DType::F32, 256) => entry!(math, "qk_norm_rope", "_256"),
        _ => entry!(math, "qk_norm_rope", ""),
    };
    let mut args: Vec<Arg> = operands.into_iter().map(Arg::Region).collect();
    args.push(Arg::Region(call.writes[1]));
    args.extend(numbers([
        op.rows,
        op.seq_len.max(1),
        heads.n_heads,
        heads.n_kv_heads,
        heads.head_dim,
    ]));
    args.push(Arg::F32(op.eps));
    let units = op.rows * (heads.n_heads + 2 * heads.n_kv_heads);
    let blocks = units.div_ceil(BLOCK / group.unwrap_or(32));
    one(entry, [blocks, 1], [number(BLOCK), 1], args)
}

/// Threads of a block that serves a piece.
const PIECE_THREADS: u32 = 512;

/// The inverse rotation and the norm's backward in place, and the weight gradients where asked for.
pub fn norm_grad(op: &QkNormRopeGrad, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    let (heads, math, tokens) = (op.heads, op.math, op.sum.tokens);
    if heads.columns() == 0 {
        return CallLaunches::default();
    }
    let operands: Vec<Region> = call
        .reads
        .iter()
        .chain(&call.writes[..1])
        .copied()
        .collect();
    // All but the inverse norms, which are read one by one.
    let [first @ .., _, dqkv] = operands.as_slice() else {
        return CallLaunches::default();
    };
    let group = group(&heads, math, &[first, &[*dqkv]].concat());
    let mut args: Vec<Arg> = operands.iter().map(|&r| Arg::Region(r)).collect();
    let shape = [
        op.seq_len.max(1),
        heads.n_heads,
        heads.n_kv_heads,
        heads.head_dim,
    ];
    if !op.weight_grad {
        args.extend(numbers([tokens]));
        args.extend(numbers(shape));
        let entry = match group {
            Some(4) => entry!(math, "qk_norm_rope_grad", "_heads_32"),
            Some(8) => entry!(math, "qk_norm_rope_grad", "_heads_64"),
            Some(16) => entry!(math, "qk_norm_rope_grad", "_heads_128"),
            Some(32) => entry!(math, "qk_norm_rope_grad", "_heads_256"),
            _ => entry!(math, "qk_norm_rope_grad", "_heads"),
        };
        let blocks = (tokens * heads.rotated()).div_ceil(BLOCK / group.unwrap_or(32));
        return one(entry, [blocks, 1], [number(BLOCK), 1], args);
    }
    let weights = [call.writes[1], call.writes[2]];
    if tokens == 0 {
        return no_tokens(&weights);
    }
    args.extend(regions(weights));
    weight_grads(op, group, (args, shape), device)
}

/// The launch with weight gradients, a block a piece; `args` are its regions.
fn weight_grads(
    op: &QkNormRopeGrad,
    group: Option<usize>,
    (mut args, shape): (Vec<Arg>, [usize; 4]),
    device: &DeviceShape,
) -> CallLaunches {
    let (heads, math, cut) = (op.heads, op.math, Cut::new(&op.sum));
    let pieces = cut.grains() * cut.pieces();
    let workspace = Workspace {
        counters: 1,
        partials: pieces * 2 * heads.head_dim,
    };
    let token_bytes = heads.rotated() * heads.head_dim * 8;
    let held = held_tokens(token_bytes, cut.piece, device);
    let entry = match (held, group) {
        (0, _) => entry!(math, "qk_norm_rope_grad", ""),
        (_, Some(4)) => entry!(math, "qk_norm_rope_grad", "_staged_32"),
        (_, Some(8)) => entry!(math, "qk_norm_rope_grad", "_staged_64"),
        (_, Some(16)) => entry!(math, "qk_norm_rope_grad", "_staged_128"),
        (_, Some(32)) => entry!(math, "qk_norm_rope_grad", "_staged_256"),
        _ => entry!(math, "qk_norm_rope_grad", "_staged"),
    };
    args.extend(cut.numbers());
    args.extend(numbers(shape));
    args.extend(numbers([held]));
    args.extend(workspace.args());
    let launches = one(entry, [pieces, 1], [PIECE_THREADS, 1], args);
    workspace.with(launches, held * token_bytes)
}

/// Tokens of a piece that a block holds in shared memory: as many as let two blocks fit, else as many as
/// one block can; 0 where not even one token fits.
fn held_tokens(token_bytes: usize, piece: usize, device: &DeviceShape) -> usize {
    let room = match token_bytes <= shared_of_two(device) {
        true => shared_of_two(device),
        false => shared_of_one(device),
    };
    (room / token_bytes.max(1)).min(piece)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_holds_what_lets_two_fit() {
        let device = DeviceShape {
            multiprocessors: 132,
            shared_bytes_per_block: 232_448,
            warpgroups: true,
        };
        assert_eq!(held_tokens(24 * 64 * 8, 32, &device), 9);
        assert_eq!(held_tokens(2 * 8 * 8, 32, &device), 32);
        assert_eq!(held_tokens(200_000, 32, &device), 1);
        assert_eq!(held_tokens(300_000, 32, &device), 0);
    }
}
