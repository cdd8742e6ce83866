//! Launches of copies and constants.

use super::call::{Arg, CallLaunches, DeviceShape};
use super::tree_add::{one, words};
use crate::layout::PlacedCall;
use crate::op::copy::{Copy, FillNeutral};

/// Threads of a block and the elements it takes; the kernels' own constants.
const THREADS: u32 = 256;
const BLOCK: usize = 4096;

/// `target = source`.
pub fn copy(op: &Copy, call: &PlacedCall, _device: &DeviceShape) -> CallLaunches {
    let [low, high] = words(op.elements);
    let args = vec![
        Arg::Region(call.reads[0]),
        Arg::Region(call.writes[0]),
        low,
        high,
    ];
    one("copy_f32", (op.elements.div_ceil(BLOCK), THREADS), args)
}

/// `target = -0.0`.
pub fn fill_neutral(op: &FillNeutral, call: &PlacedCall, _device: &DeviceShape) -> CallLaunches {
    let [low, high] = words(op.elements);
    let args = vec![Arg::Region(call.writes[0]), low, high];
    let blocks = op.elements.div_ceil(BLOCK);
    one("fill_neutral_f32", (blocks, THREADS), args)
}
