//! Launches of AdamW over the whole parameter arena.

use super::call::{Arg, CallLaunches, DeviceShape};
use super::rows::entry;
use super::tree_add::{one, words};
use crate::layout::PlacedCall;
use crate::op::adamw::AdamW;
use crate::shape::DType;

/// Threads of a block and the elements it takes; the kernel's own constants.
const THREADS: u32 = 256;
const BLOCK: usize = 2048;

/// One step of AdamW, or nothing at all when the report says that the step is dropped.
pub fn update(op: &AdamW, call: &PlacedCall, _device: &DeviceShape) -> CallLaunches {
    let regions = call.reads.iter().chain(&call.writes);
    let mut args: Vec<Arg> = regions.map(|&region| Arg::Region(region)).collect();
    args.extend(words(op.elements));
    args.extend(words(op.decayed));
    if op.math.storage() != DType::F32 {
        let shadowed = op.shadowed();
        args.extend(words(shadowed.start));
        args.extend(words(shadowed.len()));
    }
    let constants = [
        op.beta1,
        op.one_minus_beta1,
        op.beta2,
        op.one_minus_beta2,
        op.eps,
    ];
    args.extend(constants.map(Arg::F32));
    let entry = entry!(op.math, "adamw", "");
    one(entry, (op.elements.div_ceil(BLOCK), THREADS), args)
}
