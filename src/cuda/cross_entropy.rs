//! Launches of weighted cross-entropy and of the loss.

use super::call::{Arg, CallLaunches, DeviceShape, KernelLaunch};
use super::rows::{entry, vector_width};
use super::tree_add::one;
use crate::layout::PlacedCall;
use crate::num::logits::LOGIT_TILE;
use crate::num::tree::TokenSum;
use crate::op::cross_entropy::{CrossEntropy, LogitsAfter, LossSum};
use crate::shape::DType;

/// Lanes of a row reduction, one a thread.
const LANES: u32 = 256;
/// Rows of a block of the kernels that take a row a warp.
const WARPS: usize = 4;
/// Static shared memory of the kernel for long rows.
const STATIC_BYTES: usize = 1056;
/// Shared memory that the system keeps of every block.
const RESERVED_BYTES: usize = 1024;
/// A row that is not kept whole is kept up to a multiple of this; the kernel's own constant.
const TAIL_STEP: usize = 4096;
/// Blocks of the kernel for long rows that a multiprocessor has registers for.
const MOST_RESIDENT: usize = 3;
/// The same of the kernel for narrow rows: threads, static shared memory, blocks.
const NARROW_THREADS: u32 = 512;
const NARROW_STATIC_BYTES: usize = 1600;
const NARROW_MOST_RESIDENT: usize = 2;
/// Tiles of the longest row that it takes.
const NARROW_MOST_TILES: usize = 64;

/// Bytes of shared memory that any block may have without asking.
const SMALL_SHARED: usize = 48 << 10;
const MOST_THREADS: usize = 1024;

/// Loss and hit of every row, and the gradient in place where the op asks for it: short rows a warp
/// each, long ones a block each, with as much of the row in shared memory as fits.
pub fn forward(op: &CrossEntropy, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    let (logits, gradient) = match op.after {
        LogitsAfter::Gradient => (call.writes[2], 1),
        LogitsAfter::Kept => (call.reads[3], 0),
    };
    // Where there is no gradient there is no loss scale either; the kernel then reads no meaning in it.
    let scale = match op.after {
        LogitsAfter::Gradient => call.reads.get(3).copied(),
        LogitsAfter::Kept => op.math.scales_loss().then_some(call.reads[2]),
    };
    let operands = [
        &call.reads[..3],
        scale.as_slice(),
        &call.writes[..2],
        &[logits],
    ];
    let regions = operands.into_iter().flatten();
    let mut args: Vec<Arg> = regions.map(|&r| Arg::Region(r)).collect();
    args.extend([op.rows, op.vocab_size].map(|n| Arg::U32(n as u32)));
    let short = match op.vocab_size {
        0..=256 => Some(entry!(op.math, "cross_entropy", "_warp256")),
        257..=1024 => Some(entry!(op.math, "cross_entropy", "_warp1024")),
        _ => None,
    };
    if let Some(entry) = short {
        args.push(Arg::U32(gradient));
        return one(entry, (op.rows.div_ceil(WARPS), 32 * WARPS as u32), args);
    }
    let multiprocessors = device.multiprocessors as usize;
    let narrow = op.math.storage() != DType::F32;
    let by_octets = vector_width(op.vocab_size, op.math, &[logits]) > 1
        && op.vocab_size <= NARROW_MOST_TILES * LOGIT_TILE;
    if narrow && !by_octets {
        args.push(Arg::U32(gradient));
        let blocks = op.rows.min(multiprocessors * MOST_RESIDENT);
        let entry = entry!(op.math, "cross_entropy", "_any");
        return one(entry, (blocks, LANES), args);
    }
    let room = device.shared_bytes_per_block as usize;
    let long = match narrow {
        true => LongRows::narrow(op.vocab_size, room),
        false => LongRows::wide(op.vocab_size, room),
    };
    args.extend([Arg::U32(long.kept as u32), Arg::U32(gradient)]);
    let blocks = op.rows.min(multiprocessors * long.resident);
    let entry = entry!(op.math, "cross_entropy", "");
    let mut launches = one(entry, (blocks, long.threads), args);
    for launch in &mut launches.launches {
        launch.shared_bytes = long.bytes as u32;
    }
    launches
}

/// How a kernel for long rows is launched on a device with `room` bytes of shared memory a block.
struct LongRows {
    /// Elements of a row that a block keeps.
    kept: usize,
    /// Its dynamic shared memory.
    bytes: usize,
    threads: u32,
    /// Blocks beside each other on a multiprocessor.
    resident: usize,
}

impl LongRows {
    fn wide(vocab_size: usize, room: usize) -> Self {
        let most = room.saturating_sub(STATIC_BYTES) / size_of::<f32>();
        let kept = match vocab_size <= most {
            true => vocab_size,
            false => most / TAIL_STEP * TAIL_STEP,
        };
        let bytes = kept * size_of::<f32>();
        let of_block = bytes + STATIC_BYTES + RESERVED_BYTES;
        LongRows {
            kept,
            bytes,
            threads: LANES,
            resident: ((room + RESERVED_BYTES) / of_block).clamp(1, MOST_RESIDENT),
        }
    }

    /// What is not kept passes through one tile more.
    fn narrow(vocab_size: usize, room: usize) -> Self {
        let most = room.saturating_sub(NARROW_STATIC_BYTES) / size_of::<u16>();
        let (kept, places) = match vocab_size <= most {
            true => (vocab_size, vocab_size),
            false => {
                let tiles = (most / LOGIT_TILE).max(1);
                ((tiles - 1) * LOGIT_TILE, tiles * LOGIT_TILE)
            }
        };
        let bytes = places * size_of::<u16>();
        let of_block = bytes + NARROW_STATIC_BYTES + RESERVED_BYTES;
        LongRows {
            kept,
            bytes,
            threads: NARROW_THREADS,
            resident: ((room + RESERVED_BYTES) / of_block).clamp(1, NARROW_MOST_RESIDENT),
        }
    }
}

/// Tokens of a loss, of a grain and of a piece, as its kernels take them.
pub(super) fn loss_cut(sum: &TokenSum) -> [usize; 3] {
    let grain = sum.grain.clamp(1, sum.tokens.max(1));
    let piece = sum.piece.clamp(1, sum.grain.max(1));
    [sum.tokens, grain, piece]
}

/// Leaves of a loss: pieces of all grains, the last grain counted as whole.
pub(super) fn loss_places(sum: &TokenSum) -> usize {
    let [tokens, grain, piece] = loss_cut(sum);
    tokens.div_ceil(grain) * grain.div_ceil(piece)
}

/// The loss: row losses in token order, cut as the op says, times one over the normaliser. One block.
pub fn loss_sum(op: &LossSum, call: &PlacedCall, _device: &DeviceShape) -> CallLaunches {
    let [tokens, grain, piece] = loss_cut(&op.sum);
    let places = loss_places(&op.sum);
    let bytes = places * size_of::<f32>();
    let in_shared = bytes <= SMALL_SHARED;
    let threads = places.next_multiple_of(32).clamp(32, MOST_THREADS);
    let mut args: Vec<Arg> = call.reads.iter().map(|&r| Arg::Region(r)).collect();
    args.push(Arg::Region(call.writes[0]));
    args.push(Arg::Workspace { offset: 0 });
    let sizes = [usize::from(in_shared), tokens, grain, piece];
    args.extend(sizes.map(|n| Arg::U32(n as u32)));
    CallLaunches {
        launches: vec![KernelLaunch {
            entry: "loss_sum_f32",
            grid: [1, 1, 1],
            block: [threads as u32, 1, 1],
            shared_bytes: if in_shared { bytes as u32 } else { 0 },
            args,
        }],
        workspace_bytes: if in_shared { 0 } else { bytes },
        zeroed_bytes: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Region;
    use crate::num::tree::TokenSum;
    use crate::op::{Op, OpCall};
    use crate::shape::Math;

    const H200: DeviceShape = DeviceShape {
        multiprocessors: 132,
        shared_bytes_per_block: 232_448,
        warpgroups: true,
    };

    fn placed(op: impl Into<Op>, reads: usize, writes: usize) -> PlacedCall {
        let regions = |n: usize, from: usize| {
            let region = |i| Region {
                offset: from + 256 * i,
                bytes: 4,
            };
            (0..n).map(region).collect()
        };
        PlacedCall {
            call: OpCall {
                op: op.into(),
                reads: vec![],
                writes: vec![],
            },
            reads: regions(reads, 0),
            writes: regions(writes, 1 << 16),
        }
    }

    fn launch(rows: usize, vocab_size: usize, device: &DeviceShape) -> KernelLaunch {
        let after = LogitsAfter::Gradient;
        let op = CrossEntropy {
            math: Math::F32,
            rows,
            vocab_size,
            after,
        };
        forward(&op, &placed(op.clone(), 3, 3), device)
            .launches
            .remove(0)
    }

    #[test]
    fn the_vocabulary_decides_the_kernel_and_what_is_kept() {
        let tiny = launch(1024, 256, &H200);
        assert_eq!(
            (tiny.entry, tiny.grid[0]),
            ("cross_entropy_f32_warp256", 256)
        );
        assert_eq!(launch(9, 1024, &H200).entry, "cross_entropy_f32_warp1024");
        let gpt2 = launch(8192, 50_304, &H200);
        assert_eq!((gpt2.grid[0], gpt2.shared_bytes), (132, 201_216));
        let qwen = launch(8192, 151_936, &H200);
        assert_eq!((qwen.grid[0], qwen.shared_bytes), (132, 57_344 * 4));
        assert_eq!(qwen.args[8], Arg::U32(57_344));
        let mid = launch(8192, 5000, &H200);
        assert_eq!((mid.grid[0], mid.shared_bytes), (3 * 132, 20_000));
        assert_eq!(launch(5, 5000, &H200).grid[0], 5);
    }

    #[test]
    fn no_block_asks_for_more_than_the_device_gives() {
        for shared_bytes_per_block in [48 << 10, 99 << 10, 163 << 10, 227 << 10] {
            let device = DeviceShape {
                shared_bytes_per_block,
                ..H200
            };
            for vocab_size in [2000, 12_000, 50_304, 57_800, 57_900, 151_936] {
                let bytes = launch(1, vocab_size, &device).shared_bytes as usize + STATIC_BYTES;
                assert!(bytes <= shared_bytes_per_block as usize, "{vocab_size}");
            }
        }
    }

    #[test]
    fn a_long_loss_sum_has_its_leaves_in_the_workspace() {
        let of = |tokens, grain, piece| {
            let sum = TokenSum {
                tokens,
                grain,
                piece,
            };
            let op = LossSum { sum };
            loss_sum(&op, &placed(op.clone(), 2, 1), &H200)
        };
        let short = of(8192, 8192, 32);
        assert_eq!(
            (short.launches[0].block[0], short.workspace_bytes),
            (256, 0)
        );
        let long = of(1 << 20, 1 << 20, 32);
        assert_eq!(long.launches[0].shared_bytes, 0);
        assert_eq!(long.workspace_bytes, (1 << 15) * 4);
        // A piece longer than its grain is one grain long.
        let sizes = of(64, 8, 32).launches[0].args[6..].to_vec();
        assert_eq!(sizes, [Arg::U32(8), Arg::U32(8)]);
    }
}
