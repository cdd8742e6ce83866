//! The launch that hands a recurrent state on.

use super::call::{Arg, CallLaunches, DeviceShape};
use super::tree_add::{one, words};
use crate::layout::PlacedCall;
use crate::op::carry_state::CarryState;

/// Blocks of a multiprocessor from which on a thread takes more than one element.
const BLOCKS: usize = 16;

/// `state = next` unless the step is dropped.
pub fn carry(op: &CarryState, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    let regions = [call.reads[0], call.reads[1], call.writes[0]];
    let mut args: Vec<Arg> = regions.map(Arg::Region).to_vec();
    args.extend(words(op.elements));
    let most = device.multiprocessors as usize * BLOCKS;
    let blocks = op.elements.div_ceil(256).min(most);
    one("carry_state_f32", (blocks, 256), args)
}
