//! Launches of weighted cross-entropy and of the loss.

use super::call::{Arg, CallLaunches, DeviceShape, KernelLaunch};
use super::rows::{entry, vector_width};
use super::tree_add::one;
use crate::layout::{PlacedCall, Region};
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
/// The same of the kernel for narrow rows: threads, static shared memory and blocks.
const NARROW_THREADS: u32 = 512;
const NARROW_STATIC_BYTES: usize = 1408;
const NARROW_MOST_RESIDENT: usize = 2;
/// Logits of shared memory that it takes in a round: two tiles.
const NARROW_ROUND: usize = 2 * LOGIT_TILE;
/// Tiles that its form for long rows keeps in registers, behind the whole rounds in shared memory.
const NARROW_TAIL_TILES: usize = 5;

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
    let long = LongRows::of(op, device, logits);
    args.extend(long.kept.map(|n| Arg::U32(n as u32)));
    args.push(Arg::U32(gradient));
    let blocks = op.rows.min(device.multiprocessors as usize * long.resident);
    let mut launches = one(long.entry, (blocks, long.threads), args);
    for launch in &mut launches.launches {
        launch.shared_bytes = long.bytes as u32;
    }
    launches
}

/// How rows of more than 1,024 logits are served.
struct LongRows {
    entry: &'static str,
    /// Elements of a row that a block keeps; `None` for a kernel that keeps nothing.
    kept: Option<usize>,
    /// Its dynamic shared memory.
    bytes: usize,
    threads: u32,
    /// Blocks beside each other on a multiprocessor.
    resident: usize,
}

impl LongRows {
    fn of(op: &CrossEntropy, device: &DeviceShape, logits: Region) -> Self {
        let room = device.shared_bytes_per_block as usize;
        if op.math.storage() == DType::F32 {
            return Self::wide(op.vocab_size, room);
        }
        let by_octets = vector_width(op.vocab_size, op.math, &[logits]) > 1;
        let narrow = by_octets.then(|| Self::narrow(op, room)).flatten();
        narrow.unwrap_or(LongRows {
            entry: entry!(op.math, "cross_entropy", "_any"),
            kept: None,
            bytes: 0,
            threads: LANES,
            resident: MOST_RESIDENT,
        })
    }

    fn wide(vocab_size: usize, room: usize) -> Self {
        let most = room.saturating_sub(STATIC_BYTES) / size_of::<f32>();
        let kept = match vocab_size <= most {
            true => vocab_size,
            false => most / TAIL_STEP * TAIL_STEP,
        };
        let bytes = kept * size_of::<f32>();
        let of_block = bytes + STATIC_BYTES + RESERVED_BYTES;
        LongRows {
            entry: "cross_entropy_f32",
            kept: Some(kept),
            bytes,
            threads: LANES,
            resident: ((room + RESERVED_BYTES) / of_block).clamp(1, MOST_RESIDENT),
        }
    }

    /// Rows that fit in shared memory, or in it and in registers.
    fn narrow(op: &CrossEntropy, room: usize) -> Option<Self> {
        let most = room.saturating_sub(NARROW_STATIC_BYTES) / size_of::<u16>();
        let whole = op.vocab_size <= most;
        let kept = match whole {
            true => op.vocab_size,
            false => most / NARROW_ROUND * NARROW_ROUND,
        };
        let bytes = kept * size_of::<u16>();
        let of_block = bytes + NARROW_STATIC_BYTES + RESERVED_BYTES;
        let fits = kept > 0 && op.vocab_size - kept <= NARROW_TAIL_TILES * LOGIT_TILE;
        fits.then_some(LongRows {
            entry: match whole {
                true => entry!(op.math, "cross_entropy", ""),
                false => entry!(op.math, "cross_entropy", "_long"),
            },
            kept: Some(kept),
            bytes,
            threads: NARROW_THREADS,
            resident: ((room + RESERVED_BYTES) / of_block).clamp(1, NARROW_MOST_RESIDENT),
        })
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
    use crate::cuda::call::H200;
    use crate::layout::Region;
    use crate::num::tree::TokenSum;
    use crate::op::{Op, OpCall};
    use crate::shape::Math;

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

    fn launch_in(math: Math, rows: usize, vocab_size: usize, device: &DeviceShape) -> KernelLaunch {
        let after = LogitsAfter::Gradient;
        let op = CrossEntropy {
            math,
            rows,
            vocab_size,
            after,
        };
        let reads = if math.scales_loss() { 4 } else { 3 };
        forward(&op, &placed(op.clone(), reads, 3), device)
            .launches
            .remove(0)
    }

    fn launch(rows: usize, vocab_size: usize, device: &DeviceShape) -> KernelLaunch {
        launch_in(Math::F32, rows, vocab_size, device)
    }

    #[test]
    fn narrow_rows_are_kept_in_shared_memory_and_in_registers() {
        let bf16 = |vocab_size| launch_in(Math::Bf16, 8192, vocab_size, &H200);
        let gpt2 = bf16(50_304);
        assert_eq!((gpt2.entry, gpt2.block[0]), ("cross_entropy_bf16", 512));
        assert_eq!((gpt2.grid[0], gpt2.shared_bytes), (2 * 132, 100_608));
        assert_eq!(gpt2.args[8], Arg::U32(50_304));
        let qwen = bf16(151_936);
        assert_eq!(qwen.entry, "cross_entropy_bf16_long");
        assert_eq!((qwen.grid[0], qwen.shared_bytes), (132, 14 * 2 * 8192));
        assert_eq!(qwen.args[8], Arg::U32(14 * 8192));
        assert_eq!(bf16(19 * 8192).entry, "cross_entropy_bf16_long");
        // Rows that do not begin at multiples of 16 bytes, and rows that do not fit.
        for vocab_size in [50_257, 19 * 8192 + 8] {
            assert_eq!(bf16(vocab_size).entry, "cross_entropy_bf16_any");
        }
        assert_eq!(bf16(256).entry, "cross_entropy_bf16_warp256");
        // A device on which fewer rounds fit keeps whole ones, and one on which none fits keeps nothing.
        let on = |shared_bytes_per_block, vocab_size| {
            let device = DeviceShape {
                shared_bytes_per_block,
                ..H200
            };
            launch_in(Math::Bf16, 3, vocab_size, &device)
        };
        assert_eq!(on(163 << 10, 15 * 8192).shared_bytes, 10 * 2 * 8192);
        assert_eq!(on(99 << 10, 11 * 8192).entry, "cross_entropy_bf16_long");
        assert_eq!(on(99 << 10, 11 * 8192 + 8).entry, "cross_entropy_bf16_any");
        assert_eq!(on(20 << 10, 16_384).entry, "cross_entropy_bf16_any");
        let f16 = launch_in(Math::F16, 3, 8192, &H200);
        assert_eq!((f16.entry, f16.grid[0]), ("cross_entropy_f16", 3));
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
            for vocab_size in [
                2000, 12_000, 50_304, 57_800, 57_904, 115_424, 115_432, 151_936,
            ] {
                let wide = launch(1, vocab_size, &device).shared_bytes as usize + STATIC_BYTES;
                let narrow = launch_in(Math::Bf16, 1, vocab_size, &device).shared_bytes as usize;
                let most = wide.max(narrow + NARROW_STATIC_BYTES);
                assert!(most <= shared_bytes_per_block as usize, "{vocab_size}");
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
