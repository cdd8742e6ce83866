//! Launches of the global gradient norm and of the step's decision.

use super::call::{Arg, CallLaunches, DeviceShape, KernelLaunch};
use super::tree_add::{one, words};
use crate::layout::PlacedCall;
use crate::op::clip::{Clip, GradSquares};

/// Lanes of a row reduction, one a thread.
const LANES: u32 = 256;
const WARP: usize = 32;
/// Chunks of 32 partials that a warp folds together; the kernel's own constant.
const TOGETHER: usize = 4;
const MOST_WARPS: usize = 32;

/// The sum of squares of every block of the gradient arena.
pub fn squares(op: &GradSquares, call: &PlacedCall, _device: &DeviceShape) -> CallLaunches {
    let [low, high] = words(op.elements);
    let args = vec![
        Arg::Region(call.reads[0]),
        Arg::Region(call.writes[0]),
        low,
        high,
    ];
    one("grad_squares_f32", (op.partials(), LANES), args)
}

/// Chunks of 32 partials; one where there are none.
fn chunks(partials: usize) -> usize {
    partials.div_ceil(WARP).max(1)
}

/// Numbers of 8 bytes that a block needs in shared memory to fold so many partials.
pub(super) fn shared_doubles(partials: usize) -> usize {
    chunks(partials) + chunks(partials).div_ceil(WARP)
}

/// The report of the step: one block. Its shared memory, 8.25 bytes for 32 partials, is the limit on
/// their number: 850,000 on a GPU that gives a block 227 KB, as 14 billion parameters need.
pub fn clip(op: &Clip, call: &PlacedCall, _device: &DeviceShape) -> CallLaunches {
    let chunks = chunks(op.partials);
    let warps = chunks.div_ceil(TOGETHER).min(MOST_WARPS);
    let doubles = shared_doubles(op.partials);
    let mut args: Vec<Arg> = call.reads.iter().map(|&r| Arg::Region(r)).collect();
    args.extend(call.writes.iter().map(|&r| Arg::Region(r)));
    args.push(Arg::U32(op.partials as u32));
    args.extend(op.loss_scaling.map(|s| Arg::U32(s.growth_interval)));
    CallLaunches {
        launches: vec![KernelLaunch {
            entry: match op.loss_scaling {
                Some(_) => "clip_f16",
                None => "clip_f32",
            },
            grid: [1, 1, 1],
            block: [(warps * WARP) as u32, 1, 1],
            shared_bytes: (doubles * size_of::<f64>()) as u32,
            args,
        }],
        ..CallLaunches::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Region;
    use crate::op::{Op, OpCall};

    /// The launch of clip for so many partials.
    fn of(partials: usize) -> KernelLaunch {
        let op = Clip {
            loss_scaling: None,
            partials,
        };
        let region = |offset| Region { offset, bytes: 4 };
        let call = PlacedCall {
            call: OpCall {
                op: Op::from(op.clone()),
                reads: vec![],
                writes: vec![],
            },
            reads: [0, 256, 512].map(region).to_vec(),
            writes: vec![region(768)],
        };
        let device = DeviceShape {
            multiprocessors: 132,
            shared_bytes_per_block: 232_448,
        };
        clip(&op, &call, &device).launches.remove(0)
    }

    #[test]
    fn clip_takes_as_many_warps_as_have_work_and_room_for_two_levels() {
        assert_eq!((of(1).block[0], of(1).shared_bytes), (32, 16));
        assert_eq!((of(129).block[0], of(129).shared_bytes), (64, 48));
        assert_eq!((of(1 << 20).block[0]), 1024);
        assert!(of(850_000).shared_bytes <= 232_448);
    }
}
