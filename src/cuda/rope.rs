//! Launches of the rotary position embedding, alone or fused with the norms of the heads.

use super::call::{Arg, CallLaunches, DeviceShape};
use super::rows::{
    Cut, Workspace, aligned, entry, no_tokens, number, numbers, one, regions, shared_of_one,
    shared_of_two,
};
use crate::layout::{PlacedCall, Region};
use crate::op::rope::{Heads, QkNormRope, QkNormRopeGrad, Rope, RopeGrad};
use crate::shape::{DType, Math};

/// Heads of a block where a warp serves a head of a row.
const HEADS: usize = 8;

/// Rotates queries and keys in place.
pub fn forward(op: &Rope, call: &PlacedCall, _device: &DeviceShape) -> CallLaunches {
    let operands = [call.reads[0], call.writes[0]];
    let quads = by_quads(&op.heads, &operands);
    let entry = match quads {
        true => entry!(op.math, "rope", "_quads"),
        false => entry!(op.math, "rope", ""),
    };
    turn((entry, quads), operands, (op.rows, op.seq_len, op.heads))
}

/// Rotates the gradients of queries and keys back in place.
pub fn grad(op: &RopeGrad, call: &PlacedCall, _device: &DeviceShape) -> CallLaunches {
    let operands = [call.reads[0], call.writes[0]];
    let quads = by_quads(&op.heads, &operands);
    let entry = match quads {
        true => entry!(op.math, "rope_grad", "_quads"),
        false => entry!(op.math, "rope_grad", ""),
    };
    turn((entry, quads), operands, (op.rows, op.seq_len, op.heads))
}

/// Whether both halves of all heads, and the angles, can be read by fours.
fn by_quads(heads: &Heads, operands: &[Region; 2]) -> bool {
    heads.head_dim.is_multiple_of(2) && aligned(heads.head_dim / 2, operands)
}

/// Heads that a thread rotates, one after another with the same angles; the kernel's own constant.
const HEADS_A_THREAD: usize = 4;

/// A block has a thread for each quad of a head's pairs, or pair, and as many rows of threads as that leaves.
fn turn(
    (entry, quads): (&'static str, bool),
    operands: [Region; 2],
    (rows, seq_len, heads): (usize, usize, Heads),
) -> CallLaunches {
    let mut args = regions(operands).to_vec();
    args.extend(numbers([
        rows,
        seq_len.max(1),
        heads.rotated(),
        heads.head_dim,
        heads.columns(),
    ]));
    let pairs = if quads { 4 } else { 1 };
    let across = (heads.head_dim / 2 / pairs).clamp(1, BLOCK);
    let down = BLOCK / across;
    let units = rows * heads.rotated().div_ceil(HEADS_A_THREAD);
    let block = [number(across), number(down)];
    one(entry, [units.div_ceil(down), 1], block, args)
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

/// Heads of one kind in a row that such a group serves at most; the kernel's own constant.
const GROUP_HEADS: usize = 4;

/// Blocks for the heads of `rows` rows, of each kind so many: groups serve several together, a warp one.
fn blocks(group: Option<usize>, rows: usize, kinds: [usize; 3]) -> usize {
    let (together, threads) = match group {
        Some(threads) => (GROUP_HEADS, threads),
        None => (1, 32),
    };
    let units: usize = kinds.iter().map(|heads| heads.div_ceil(together)).sum();
    (rows * units).div_ceil(BLOCK / threads)
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
    let kinds = [heads.n_heads, heads.n_kv_heads, heads.n_kv_heads];
    let blocks = blocks(group, op.rows, kinds);
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

    #[test]
    fn a_group_serves_heads_of_one_kind_alone() {
        assert_eq!(blocks(Some(16), 4096, [16, 8, 8]), 4096 * 8 / 16);
        assert_eq!(blocks(Some(8), 3, [14, 2, 2]), 1);
        assert_eq!(blocks(Some(32), 3, [5, 1, 1]), 2);
        assert_eq!(blocks(None, 5, [3, 1, 1]), 4);
    }
}
