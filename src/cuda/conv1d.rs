//! Launches of the causal convolution and its gradient.

use super::call::{Arg, CallLaunches, DeviceShape};
use super::rows::{Cut, Workspace, by_fours, entry, no_tokens, numbers, one};
use crate::layout::PlacedCall;
use crate::op::conv1d::{Conv1d, Conv1dGrad, ConvShape};

/// The flags of the kernels.
const WHOLE: usize = 1;
const TWO_PARTS: usize = 1;
const CARRIED: usize = 2;
const WEIGHTS: usize = 4;

/// The most rows of a thread of forward, and the most pieces of a block of the gradient.
const MOST_ROWS: usize = 16;
const MOST_PIECES: usize = 8;

/// Warps a multiprocessor below which a thread takes fewer rows, and blocks below which a block takes fewer pieces.
const WARPS: usize = 24;
const BLOCKS: usize = 4;

/// Columns of a block of the gradient.
const COLUMNS: usize = 32;

macro_rules! by_taps {
    ($math:expr, $stem:literal, $taps:expr) => {
        match $taps {
            4 => entry!($math, $stem, "_4"),
            _ => entry!($math, $stem, "_any"),
        }
    };
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
    let across = shape.d_inner.div_ceil(4 * 32);
    let wanted = device.multiprocessors as usize * WARPS;
    let run = in_one(shape.rows() * across, MOST_ROWS, wanted);
    let regions = [xz, weight, bias, state, keep, u, next];
    let mut args: Vec<Arg> = regions.map(Arg::Region).to_vec();
    args.extend(sizes(shape));
    args.extend(numbers([run, flags]));
    let down = shape.rows().div_ceil(8 * run);
    let entry = by_taps!(op.math, "conv1d", shape.d_conv);
    one(entry, [down, across], [32, 8], args)
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
    let across = shape.d_inner.div_ceil(COLUMNS);
    let wanted = device.multiprocessors as usize * BLOCKS;
    let group = in_one(cut.grains() * cut.pieces() * across, MOST_PIECES, wanted);
    let groups = cut.grains() * cut.pieces().div_ceil(group);
    let workspace = Workspace {
        counters: across,
        partials: groups * across * COLUMNS * (shape.d_conv + 1),
    };
    let regions = [du, more, inputs[0], inputs[1], inputs[2], state, keep];
    let mut args: Vec<Arg> = regions.map(Arg::Region).to_vec();
    args.extend([dxz, dweight, dbias].map(Arg::Region));
    args.extend(numbers([shape.seq_len, shape.d_inner, shape.d_conv]));
    args.extend(cut.numbers());
    args.extend(numbers([group, flags]));
    args.extend(workspace.args());
    let entry = by_taps!(op.math, "conv1d_grad", shape.d_conv);
    workspace.with(one(entry, [groups, across], [32, 8], args), 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_takes_more_rows_only_while_the_device_stays_busy() {
        assert_eq!(in_one(4096 * 12, 16, 132 * 24), 8);
        assert_eq!(in_one(1024 * 2, 16, 132 * 24), 1);
        assert_eq!(in_one(1 << 20, 16, 132 * 24), 16);
        assert_eq!(in_one(0, 16, 1), 1);
    }
}
