//! Launches of the selective scan and its gradient.

use super::call::{Arg, CallLaunches, DeviceShape};
use super::rows::{Cut, Workspace, by_fours, entry, no_tokens, number, numbers, one};
use crate::layout::{PlacedCall, Region};
use crate::op::scan::{Scan, ScanGrad, ScanShape};
use crate::shape::Math;

/// Threads of a block, states of a thread, and positions of a tile; the kernels' own constants.
const THREADS: usize = 128;
const OWN: usize = 4;
const TILE: usize = 16;

/// The most threads of a channel.
const MOST_GROUPS: usize = 16;

/// What a thread of the gradient keeps of each quad of channels, in quads.
const KEPT_OF_A_QUAD: usize = 4;

/// The flags of both kernels, and those of each.
const WHOLE: usize = 1;
const CARRIED: usize = 2;
const WEIGHTS: usize = 2;
const STATE: usize = 4;
const RESTORE: usize = 8;

/// Threads that serve a channel.
fn groups(d_state: usize) -> usize {
    match d_state {
        8 | 16 | 32 => d_state / OWN,
        _ => MOST_GROUPS,
    }
}

/// Channels of a block.
fn channels(d_state: usize) -> usize {
    THREADS / groups(d_state)
}

/// Quads of channels of a tile that a thread serves.
fn quads_of_a_thread(d_state: usize) -> usize {
    (TILE * channels(d_state)).div_ceil(4 * THREADS)
}

/// Blocks that serve the channels of a sequence.
fn blocks(shape: &ScanShape) -> usize {
    shape.d_inner.div_ceil(channels(shape.d_state))
}

/// The entry for so many states.
macro_rules! by_states {
    ($math:expr, $stem:literal, $d_state:expr) => {
        match $d_state {
            8 => entry!($math, $stem, "_8"),
            16 => entry!($math, $stem, "_16"),
            32 => entry!($math, $stem, "_32"),
            64 => entry!($math, $stem, "_64"),
            _ => entry!($math, $stem, "_any"),
        }
    };
}

/// Whether rows of channels and of `bc` can be read and written by four elements.
fn whole(shape: &ScanShape, math: Math, regions: &[Region]) -> bool {
    let rows = [shape.d_inner, 2 * shape.d_state];
    rows.into_iter().all(|width| by_fours(width, math, regions))
}

/// The output, the states that are stored, and the last ones where the scan is carried.
pub fn forward(op: &Scan, call: &PlacedCall, _device: &DeviceShape) -> CallLaunches {
    let (shape, [out, starts]) = (&op.shape, [0, 1].map(|i| call.writes[i]));
    if shape.rows() * shape.d_inner == 0 {
        return CallLaunches::default();
    }
    let whole = whole(shape, op.math, &[&call.reads[..4], &[out]].concat());
    let flags = WHOLE * usize::from(whole) + CARRIED * usize::from(op.carried);
    // A scan that is not carried reads and writes no state; the arguments must still be addresses.
    let [state, keep, next] = match op.carried {
        true => [call.reads[7], call.reads[8], call.writes[2]],
        false => [starts; 3],
    };
    let regions = [&call.reads[..7], &[state, keep, out, starts, next]].concat();
    let mut args: Vec<Arg> = regions.into_iter().map(Arg::Region).collect();
    let (d, n) = (shape.d_inner, shape.d_state);
    args.extend(numbers([shape.seq_len, d, n, shape.chunk.max(1)]));
    args.extend(numbers([shape.chunks(), flags]));
    let entry = by_states!(op.math, "scan", n);
    let grid = [blocks(shape), shape.batch];
    one(entry, grid, [number(THREADS), 1], args)
}

/// Where the workspace of the gradient has its partial sums: those for the weights, then those of `dbc`.
struct Partials {
    weights: usize,
    columns: usize,
}

impl Partials {
    fn of(shape: &ScanShape, weight_grad: bool) -> Self {
        let (blocks, n) = (blocks(shape), shape.d_state);
        let numbers = usize::from(weight_grad) * channels(n) * (n + 2);
        Partials {
            weights: (shape.batch * blocks * numbers).next_multiple_of(64),
            columns: blocks * shape.rows() * 2 * n,
        }
    }

    fn workspace(&self) -> Workspace {
        Workspace {
            counters: 0,
            partials: self.weights + self.columns,
        }
    }

    /// The addresses of both parts.
    fn args(&self) -> [Arg; 2] {
        [0, 4 * self.weights].map(|offset| Arg::Workspace { offset })
    }
}

/// The gradients of everything that forward reads; a second kernel adds those of `bc` over the channels and those
/// of the weights over the sequences.
pub fn grad(op: &ScanGrad, call: &PlacedCall, _device: &DeviceShape) -> CallLaunches {
    let shape = &op.shape;
    let (d, n, writes) = (shape.d_inner, shape.d_state, &call.writes);
    if shape.rows() * d == 0 {
        return no_tokens(&writes[4..]);
    }
    let [du, ddt, dbc, dxz] = [0, 1, 2, 3].map(|i| writes[i]);
    // What is not asked for is not written; the arguments must still be addresses.
    let last = writes[writes.len() - 1];
    let out = if op.restore { last } else { du };
    let dstate = match op.state_grad {
        true => writes[writes.len() - 1 - usize::from(op.restore)],
        false => dbc,
    };
    let rows = [&call.reads[..5], &[du, ddt, dxz, out]].concat();
    let flags = WHOLE * usize::from(whole(shape, op.math, &rows))
        + WEIGHTS * usize::from(op.weight_grad)
        + STATE * usize::from(op.state_grad)
        + RESTORE * usize::from(op.restore);
    let partials = Partials::of(shape, op.weight_grad);
    let [weights, columns] = partials.args();
    let regions = [&call.reads[..], &[du, ddt, dxz, dstate, out]].concat();
    let mut args: Vec<Arg> = regions.into_iter().map(Arg::Region).collect();
    args.extend([columns, weights]);
    let chunk = shape.chunk.max(1);
    args.extend(numbers([shape.seq_len, d, n, chunk]));
    args.extend(numbers([shape.chunks(), flags]));
    let tiles = chunk.min(shape.seq_len).div_ceil(TILE);
    // Each thread keeps so many quads in shared memory.
    let quads = TILE + KEPT_OF_A_QUAD * quads_of_a_thread(n) + tiles;
    let shared = quads * THREADS * OWN * size_of::<f32>();
    let grid = [blocks(shape), shape.batch];
    let entry = by_states!(op.math, "scan_grad", n);
    let scan = one(entry, grid, [number(THREADS), 1], args);
    let mut launches = partials.workspace().with(scan, shared);
    launches
        .launches
        .extend(fold(op, [columns, weights], writes).launches);
    launches
}

/// The sums over the blocks of channels, and those over the sequences.
fn fold(op: &ScanGrad, partials: [Arg; 2], writes: &[Region]) -> CallLaunches {
    let (shape, n) = (&op.shape, op.shape.d_state);
    let dbc = writes[2];
    let (of_weights, weights) = match op.weight_grad {
        true => (
            blocks(shape) * channels(n) * (n + 2),
            [writes[4], writes[5], writes[6]],
        ),
        // They are not written; the arguments must still be addresses.
        false => (0, [dbc; 3]),
    };
    let mut args = partials.to_vec();
    args.extend([dbc, weights[0], weights[1], weights[2]].map(Arg::Region));
    args.extend(numbers([shape.batch, shape.seq_len, shape.d_inner, n]));
    let grain = Cut::new(&op.sum).grain;
    args.extend(numbers([blocks(shape), grain, channels(n)]));
    let elements = shape.rows() * 2 * n;
    let grid = [elements.div_ceil(256) + of_weights.div_ceil(256), 1];
    let entry = entry!(op.math, "scan_grad", "_fold");
    one(entry, grid, [256, 1], args)
}
