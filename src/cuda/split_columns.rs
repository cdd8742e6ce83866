//! Launches of the split of columns and its inverse.

use super::call::{Arg, CallLaunches, DeviceShape};
use super::rows::{entry, number, numbers, one};
use crate::layout::{PlacedCall, Region};
use crate::op::split_columns::{SplitColumns, SplitColumnsGrad};

/// Threads of a block, and blocks of a multiprocessor from which on a thread takes more than one element.
const THREADS: usize = 256;
const BLOCKS: usize = 16;

/// `left` and `right` from `x`.
pub fn forward(op: &SplitColumns, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    let operands = [call.reads[0], call.writes[0], call.writes[1]];
    let entry = entry!(op.math, "split_columns", "");
    launch(entry, operands, [op.rows, op.n_left, op.n_right], device)
}

/// `dx` from `dleft` and `dright`.
pub fn grad(op: &SplitColumnsGrad, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    let operands = [call.reads[0], call.reads[1], call.writes[0]];
    let entry = entry!(op.math, "split_columns_grad", "");
    launch(entry, operands, [op.rows, op.n_left, op.n_right], device)
}

fn launch(
    entry: &'static str,
    operands: [Region; 3],
    [rows, n_left, n_right]: [usize; 3],
    device: &DeviceShape,
) -> CallLaunches {
    let mut args: Vec<Arg> = operands.map(Arg::Region).to_vec();
    args.extend(numbers([rows, n_left, n_right]));
    let blocks = (rows * (n_left + n_right)).div_ceil(THREADS);
    let most = device.multiprocessors as usize * BLOCKS;
    one(entry, [blocks.min(most), 1], [number(THREADS), 1], args)
}
