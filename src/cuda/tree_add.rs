//! Launches of one merge of partial gradients.

use super::call::{Arg, CallLaunches, DeviceShape, KernelLaunch};
use crate::layout::{PlacedCall, Region};
use crate::op::tree_add::TreeAdd;

/// Threads of a block and the elements it takes; the kernels' own constants.
const THREADS: u32 = 256;
const BLOCK: usize = 4096;

/// `left = left + right`.
pub fn merge(op: &TreeAdd, call: &PlacedCall, _device: &DeviceShape) -> CallLaunches {
    in_blocks(
        "tree_add_f32",
        &[call.reads[0], call.writes[0]],
        op.elements,
    )
}

/// An elementwise kernel that takes its regions and the count of their elements, in blocks of `BLOCK`.
pub(super) fn in_blocks(entry: &'static str, regions: &[Region], elements: usize) -> CallLaunches {
    let mut args: Vec<Arg> = regions.iter().map(|&region| Arg::Region(region)).collect();
    args.extend(words(elements));
    one(entry, (elements.div_ceil(BLOCK), THREADS), args)
}

/// A count that may need more than 32 bits, as two words, the low one first.
pub(super) fn words(n: usize) -> [Arg; 2] {
    [Arg::U32(n as u32), Arg::U32((n as u64 >> 32) as u32)]
}

/// One launch of a line of `blocks` blocks, without workspace; none for no block.
pub(super) fn one(
    entry: &'static str,
    (blocks, threads): (usize, u32),
    args: Vec<Arg>,
) -> CallLaunches {
    if blocks == 0 {
        return CallLaunches::default();
    }
    CallLaunches {
        launches: vec![KernelLaunch {
            entry,
            grid: [blocks as u32, 1, 1],
            block: [threads, 1, 1],
            shared_bytes: 0,
            args,
        }],
        ..CallLaunches::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_above_32_bits_keeps_its_upper_word() {
        assert_eq!(words(7), [Arg::U32(7), Arg::U32(0)]);
        assert_eq!(words((3 << 32) + 5), [Arg::U32(5), Arg::U32(3)]);
    }

    #[test]
    fn nothing_to_do_launches_nothing() {
        assert!(one("tree_add_f32", (0, 256), vec![]).launches.is_empty());
        let launches = one("tree_add_f32", (3, 256), vec![]).launches;
        assert_eq!(launches[0].grid, [3, 1, 1]);
    }
}
