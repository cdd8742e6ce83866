//! Launches of the causal convolution and its gradient.

use super::call::{Arg, CallLaunches, DeviceShape};
use super::rows::{Cut, Workspace, by_fours, entry, no_tokens, number, numbers, one};
use crate::layout::{PlacedCall, Region};
use crate::op::conv1d::{Conv1d, Conv1dGrad, ConvShape};

/// The flags of the kernels.
const WHOLE: usize = 1;
const TWO_PARTS: usize = 1;
const CARRIED: usize = 2;
const WEIGHTS: usize = 4;

/// The fewest and the most rows of a thread of forward, and the most pieces of a block of the gradient.
const LEAST_ROWS: usize = 4;
const MOST_ROWS: usize = 32;
const MOST_PIECES: usize = 8;

/// What the start of a thread costs, in rows.
const ROWS_OF_A_START: usize = 2;

/// Blocks of forward that a multiprocessor has at once, and blocks of the gradient below which they take fewer pieces.
const BLOCKS: usize = 4;

/// Channels of a warp of the gradient, one a thread.
const COLUMNS: usize = 32;

/// Warps a multiprocessor from which a thread of the gradient has two channels.
const PAIRS_FROM: usize = 8;

/// Rows of a thread of forward: those with which the device, full of blocks once or several times, is done first.
fn run(rows: usize, across: usize, device: &DeviceShape) -> usize {
    let at_once = device.multiprocessors.max(1) as usize * BLOCKS;
    let time = |run: usize| {
        let blocks = rows.div_ceil(8 * run) * across;
        blocks.div_ceil(at_once) * (run + ROWS_OF_A_START)
    };
    let runs = (1..=MOST_ROWS / LEAST_ROWS).map(|n| n * LEAST_ROWS);
    runs.min_by_key(|&run| time(run)).unwrap_or(LEAST_ROWS)
}

/// The largest power of two up to `most` with which `units` units, so many in one, still give `wanted`.
fn in_one(units: usize, most: usize, wanted: usize) -> usize {
    let fits = (units / wanted.max(1)).clamp(1, most);
    1 << fits.ilog2()
}

/// `u` and, where sequences go on, the last inputs.
pub fn forward(op: &Conv1d, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    let (shape, u) = (&op.shape, call.writes[0]);
    let [xz, weight, bias] = [0, 1, 2].map(|i| call.reads[i]);
    let whole = by_fours(shape.d_inner, op.math, &[xz, u]);
    let flags = WHOLE * usize::from(whole) + CARRIED * usize::from(op.carried);
    // Without carried states the arguments must still be addresses.
    let [state, keep, next] = match op.carried {
        true => [call.reads[3], call.reads[4], call.writes[1]],
        false => [bias, bias, u],
    };
    // Walking threads have two channels and count elements in 32 bits, the others have four.
    let walks = whole && walks(shape);
    let across = shape.d_inner.div_ceil(32 * if walks { 2 } else { 4 });
    let run = run(shape.rows(), across, device);
    let regions = [xz, weight, bias, state, keep, u, next];
    let mut args: Vec<Arg> = regions.map(Arg::Region).to_vec();
    args.extend(sizes(shape));
    args.extend(numbers([run, flags]));
    let down = shape.rows().div_ceil(8 * run);
    let entry = match walks {
        true => entry!(op.math, "conv1d", "_4_pairs"),
        false => entry!(op.math, "conv1d", "_any"),
    };
    one(entry, [down, across], [32, 8], args)
}

/// Whether threads can walk through the positions: the taps are those that the kernels hold in registers, and the elements of `xz`
/// can be counted in 32 bits.
fn walks(shape: &ConvShape) -> bool {
    shape.d_conv == 4 && u32::try_from(2 * shape.rows() * shape.d_inner).is_ok()
}

fn sizes(shape: &ConvShape) -> [Arg; 4] {
    numbers([shape.rows(), shape.seq_len, shape.d_inner, shape.d_conv])
}

/// The gradients of the input and, where they are asked for, of weight and bias.
pub fn grad(op: &Conv1dGrad, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    let (shape, dxz) = (&op.shape, call.writes[0]);
    if shape.rows() * shape.d_inner == 0 {
        return no_tokens(&call.writes[1..]);
    }
    let two = op.parts > 1;
    let flags = TWO_PARTS * usize::from(two)
        + CARRIED * usize::from(op.carried)
        + WEIGHTS * usize::from(op.weight_grad);
    let (du, inputs) = (call.reads[0], &call.reads[op.parts..]);
    let more = if two { call.reads[1] } else { du };
    let [state, keep] = match op.carried {
        true => [inputs[3], inputs[4]],
        false => [inputs[2]; 2],
    };
    let [dweight, dbias] = match op.weight_grad {
        true => [call.writes[1], call.writes[2]],
        false => [dxz; 2],
    };
    let cut = Cut::new(&op.sum);
    let regions = [du, more, inputs[0], inputs[1], inputs[2], state, keep];
    let mut args: Vec<Arg> = regions.map(Arg::Region).to_vec();
    args.extend([dxz, dweight, dbias].map(Arg::Region));
    args.extend(numbers([shape.seq_len, shape.d_inner, shape.d_conv]));
    args.extend(cut.numbers());
    let blocks = GradBlocks::of(op, &cut, &[du, more, inputs[0], dxz], device);
    let across = shape.d_inner.div_ceil(blocks.columns);
    let groups = cut.grains() * cut.pieces().div_ceil(blocks.group);
    let workspace = Workspace {
        counters: across,
        partials: groups * across * blocks.columns * (shape.d_conv + 1),
    };
    args.extend(numbers([blocks.group, flags]));
    args.extend(workspace.args());
    let block = [32, number(blocks.warps)];
    workspace.with(one(blocks.entry, [groups, across], block, args), 0)
}

/// How the gradient is dealt to blocks.
struct GradBlocks {
    entry: &'static str,
    /// Channels of a block, pieces of a block, and its warps.
    columns: usize,
    group: usize,
    warps: usize,
}

impl GradBlocks {
    fn of(op: &Conv1dGrad, cut: &Cut, regions: &[Region], device: &DeviceShape) -> Self {
        let (shape, multiprocessors) = (&op.shape, device.multiprocessors as usize);
        let pieces = cut.grains() * cut.pieces();
        if !walks(shape) {
            let units = pieces * shape.d_inner.div_ceil(COLUMNS);
            return GradBlocks {
                entry: entry!(op.math, "conv1d_grad", "_any"),
                columns: COLUMNS,
                group: in_one(units, MOST_PIECES, multiprocessors * BLOCKS),
                warps: 8,
            };
        }
        // A warp has a piece of 32 channels, or of 64 where enough warps are left.
        let pairs = by_fours(shape.d_inner, op.math, regions)
            && pieces * shape.d_inner.div_ceil(2 * COLUMNS) >= multiprocessors * PAIRS_FROM;
        let (entry, columns) = match pairs {
            true => (entry!(op.math, "conv1d_grad", "_4_pairs"), 2 * COLUMNS),
            false => (entry!(op.math, "conv1d_grad", "_4"), COLUMNS),
        };
        // Four warps of a block run beside each other; eight leave fewer partial sums.
        let units = pieces * shape.d_inner.div_ceil(columns);
        let most = match units >= multiprocessors * MOST_PIECES {
            true => MOST_PIECES,
            false => MOST_PIECES / 2,
        };
        let group = most.min(cut.pieces().next_power_of_two());
        GradBlocks {
            entry,
            columns,
            group,
            warps: group,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: DeviceShape = DeviceShape {
        multiprocessors: 132,
        shared_bytes_per_block: 232_448,
        warpgroups: true,
    };

    #[test]
    fn a_thread_takes_the_rows_that_fill_the_device() {
        // 22 x 24 blocks are exactly four a multiprocessor.
        assert_eq!(run(4096, 24, &DEVICE), 24);
        assert_eq!(run(1024, 4, &DEVICE), 4);
        assert_eq!(run(0, 1, &DEVICE), 4);
        assert!((4..=32).contains(&run(1 << 20, 24, &DEVICE)));
    }

    #[test]
    fn a_block_takes_more_pieces_only_while_the_device_stays_busy() {
        assert_eq!(in_one(128 * 48, 8, 132 * 4), 8);
        assert_eq!(in_one(32 * 8, 8, 132 * 4), 1);
        assert_eq!(in_one(0, 16, 1), 1);
    }

    fn blocks(rows: usize, d_inner: usize, d_conv: usize) -> (usize, usize, usize) {
        let sum = crate::num::tree::TokenSum {
            tokens: rows,
            grain: rows,
            piece: 32.min(rows),
        };
        let op = Conv1dGrad {
            shape: ConvShape {
                batch: 1,
                seq_len: rows,
                d_inner,
                d_conv,
            },
            sum,
            parts: 2,
            weight_grad: true,
            carried: false,
            math: crate::shape::Math::Bf16,
        };
        let region = Region {
            offset: 0,
            bytes: 4,
        };
        let found = GradBlocks::of(&op, &Cut::new(&sum), &[region], &DEVICE);
        (found.columns, found.group, found.warps)
    }

    #[test]
    fn warps_of_the_gradient_have_as_many_channels_as_leave_enough_of_them() {
        assert_eq!(blocks(4096, 1536, 4), (64, 8, 8));
        assert_eq!(blocks(1024, 256, 4), (32, 4, 4));
        assert_eq!(blocks(4096, 1534, 4), (32, 8, 8));
        assert_eq!(blocks(40, 256, 4), (32, 2, 2));
        assert_eq!(blocks(4096, 1536, 3), (32, 8, 8));
    }
}
