//! Launches of copies and constants.

use super::call::{CallLaunches, DeviceShape};
use super::tree_add::in_blocks;
use crate::layout::PlacedCall;
use crate::op::copy::{Copy, FillNeutral};

/// `target = source`.
pub fn copy(op: &Copy, call: &PlacedCall, _device: &DeviceShape) -> CallLaunches {
    in_blocks("copy_f32", &[call.reads[0], call.writes[0]], op.elements)
}

/// `target = -0.0`.
pub fn fill_neutral(op: &FillNeutral, call: &PlacedCall, _device: &DeviceShape) -> CallLaunches {
    in_blocks("fill_neutral_f32", &[call.writes[0]], op.elements)
}
