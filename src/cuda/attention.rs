//! Launches of causal attention: which kernel, how many blocks, how much shared memory.
//!
//! A block owns rows of one head: queries, or keys in the key and value pass. Kernels for heads of 32, 64
//! and 128 columns come with many rows a block, for throughput, and with few, so that a small call still
//! has blocks for every multiprocessor. One more takes every other head. Bits do not depend on the choice.

use super::attention_tensor;
use super::call::{Arg, CallLaunches, DeviceShape, KernelLaunch};
use super::rows::{by_vectors, entry};
use crate::layout::{PlacedCall, Region};
use crate::num::softmax::score_factor;
use crate::op::attention::{
    Attention, AttentionDelta, AttentionGradKeyValue, AttentionGradQuery, AttentionShape, KEY_TILE,
    score_scale,
};
use crate::shape::Math;

/// Floats from one row of a block's square of pairs to the next; `SQUARE` in `ptx/attention.cuh`.
const SQUARE_ROW: usize = KEY_TILE + 8;

/// Bytes of the widest load and store.
const WIDE: usize = 16;

/// A kernel's size.
#[derive(Clone, Copy, Debug)]
struct Kernel {
    entry: &'static str,
    /// The head's columns; `None` takes any.
    head_dim: Option<usize>,
    /// Rows of a block.
    rows: usize,
    warps: usize,
    /// Tiles of queries in shared memory; only the key and value pass may hold two.
    tiles: usize,
    /// Whether a call must have blocks of this size for the whole device, twice over.
    large: bool,
}

impl Kernel {
    const fn large(entry: &'static str, head_dim: usize, rows: usize, warps: usize) -> Self {
        Kernel {
            entry,
            head_dim: Some(head_dim),
            rows,
            warps,
            tiles: 1,
            large: true,
        }
    }

    const fn small(entry: &'static str, head_dim: usize, rows: usize, tiles: usize) -> Self {
        Kernel {
            entry,
            head_dim: Some(head_dim),
            rows,
            warps: 4,
            tiles,
            large: false,
        }
    }

    const fn any(entry: &'static str, rows: usize) -> Self {
        Kernel {
            entry,
            head_dim: None,
            rows,
            warps: 4,
            tiles: 1,
            large: false,
        }
    }
}

/// The kernels of a pass, the preferred ones first; the last one takes every call.
type Kernels = [Kernel; 7];

const FORWARD: Kernels = [
    Kernel::large("attention_f32_d32", 32, 128, 4),
    Kernel::large("attention_f32_d64", 64, 128, 4),
    Kernel::large("attention_f32_d128", 128, 128, 8),
    Kernel::small("attention_f32_d32_small", 32, 32, 1),
    Kernel::small("attention_f32_d64_small", 64, 32, 1),
    Kernel::small("attention_f32_d128_small", 128, 32, 1),
    Kernel::any("attention_f32_any", 32),
];

const GRAD_QUERY: Kernels = [
    Kernel::large("attention_grad_query_f32_d32", 32, 64, 4),
    Kernel::large("attention_grad_query_f32_d64", 64, 64, 4),
    Kernel::large("attention_grad_query_f32_d128", 128, 96, 6),
    Kernel::small("attention_grad_query_f32_d32_small", 32, 32, 1),
    Kernel::small("attention_grad_query_f32_d64_small", 64, 32, 1),
    Kernel::small("attention_grad_query_f32_d128_small", 128, 32, 1),
    Kernel::any("attention_grad_query_f32_any", 32),
];

const GRAD_KEY_VALUE: Kernels = [
    Kernel::large("attention_grad_key_value_f32_d32", 32, 64, 4),
    Kernel::large("attention_grad_key_value_f32_d64", 64, 64, 4),
    Kernel::large("attention_grad_key_value_f32_d128", 128, 64, 8),
    Kernel::small("attention_grad_key_value_f32_d32_small", 32, 16, 2),
    Kernel::small("attention_grad_key_value_f32_d64_small", 64, 16, 2),
    Kernel::small("attention_grad_key_value_f32_d128_small", 128, 16, 2),
    Kernel::any("attention_grad_key_value_f32_any", 16),
];

/// The three passes that walk over tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    Forward,
    GradQuery,
    GradKeyValue,
}

impl Pass {
    fn kernels(self) -> &'static Kernels {
        match self {
            Pass::Forward => &FORWARD,
            Pass::GradQuery => &GRAD_QUERY,
            Pass::GradKeyValue => &GRAD_KEY_VALUE,
        }
    }

    /// Pairs of a sequence and a head that own rows.
    pub(super) fn sequences(self, shape: &AttentionShape) -> usize {
        match self {
            Pass::Forward | Pass::GradQuery => shape.batch * shape.heads.n_heads,
            Pass::GradKeyValue => shape.batch * shape.heads.n_kv_heads,
        }
    }

    /// Dynamic shared memory of a block, laid out as the kernels say.
    fn shared_bytes(self, kernel: &Kernel, head_dim: usize) -> usize {
        let row = row_floats(head_dim);
        let square = kernel.rows * SQUARE_ROW;
        let tile = 2 * KEY_TILE * row;
        let floats = match self {
            Pass::Forward => kernel.rows * row + tile + square,
            Pass::GradQuery => 2 * kernel.rows * row + tile + square,
            Pass::GradKeyValue => {
                2 * kernel.rows * row + kernel.tiles * (tile + 2 * KEY_TILE) + 2 * square
            }
        };
        floats * size_of::<f32>()
    }

    /// The kernel for a call; `wide` if every row of a head lies at a multiple of 16 bytes.
    fn kernel(self, shape: &AttentionShape, wide: bool, device: &DeviceShape) -> &'static Kernel {
        let head_dim = shape.heads.head_dim;
        let serves = |kernel: &&Kernel| {
            let blocks = self.sequences(shape) * shape.seq_len.div_ceil(kernel.rows);
            let filled =
                shape.seq_len >= kernel.rows && blocks >= 2 * device.multiprocessors as usize;
            wide && kernel.head_dim == Some(head_dim)
                && (!kernel.large || filled)
                && self.shared_bytes(kernel, head_dim) <= device.shared_bytes_per_block as usize
        };
        let [.., any] = self.kernels();
        self.kernels().iter().find(serves).unwrap_or(any)
    }

    fn launch(
        self,
        (shape, math): (&AttentionShape, Math),
        call: &PlacedCall,
        device: &DeviceShape,
    ) -> CallLaunches {
        if shape.rows() == 0 {
            return CallLaunches::default();
        }
        let heads = &shape.heads;
        let operands: Vec<Region> = call.reads.iter().chain(&call.writes).copied().collect();
        let wide = by_vectors(heads.head_dim, math, &operands);
        let mut args: Vec<Arg> = operands.into_iter().map(Arg::Region).collect();
        let sizes = [
            shape.seq_len,
            heads.n_heads,
            heads.n_kv_heads,
            heads.head_dim,
        ];
        args.extend(sizes.map(|size| Arg::U32(size as u32)));
        if !math.is_f32() {
            args.push(Arg::F32(score_factor(heads.head_dim)));
            if self != Pass::Forward {
                args.push(Arg::F32(score_scale(heads.head_dim)));
            }
            return attention_tensor::launch(self, (shape, math), (wide, args), device);
        }
        args.push(Arg::F32(score_scale(heads.head_dim)));
        args.push(Arg::U32(u32::from(wide)));
        let kernel = self.kernel(shape, wide, device);
        let blocks = shape.seq_len.div_ceil(kernel.rows);
        let launch = KernelLaunch {
            entry: kernel.entry,
            grid: [self.sequences(shape) as u32, blocks as u32, 1],
            block: [32 * kernel.warps as u32, 1, 1],
            shared_bytes: self.shared_bytes(kernel, heads.head_dim) as u32,
            args,
        };
        launch.into()
    }
}

/// Floats from one row of a head in shared memory to the next; `row_floats` in `ptx/attention.cuh`.
fn row_floats(head_dim: usize) -> usize {
    4 * (head_dim.div_ceil(4) | 1)
}

/// The output and `lse`: one launch, no workspace.
pub fn forward(op: &Attention, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    Pass::Forward.launch((&op.shape, op.math), call, device)
}

/// The query columns of `dqkv`: one launch, no workspace.
pub fn grad_query(
    op: &AttentionGradQuery,
    call: &PlacedCall,
    device: &DeviceShape,
) -> CallLaunches {
    Pass::GradQuery.launch((&op.shape, op.math), call, device)
}

/// The key and value columns of `dqkv`: one launch, no workspace.
pub fn grad_key_value(
    op: &AttentionGradKeyValue,
    call: &PlacedCall,
    device: &DeviceShape,
) -> CallLaunches {
    Pass::GradKeyValue.launch((&op.shape, op.math), call, device)
}

/// Threads of a block of the delta kernels.
const DELTA_THREADS: usize = 256;
/// Rows that a thread of the delta kernels has under way; `UNDER_WAY` in `ptx/attention_delta_f32.cu`.
const DELTA_UNDER_WAY: usize = 4;

/// `delta`, one value a token and head: one launch, no workspace.
pub fn delta(op: &AttentionDelta, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    let (head_dim, rows) = (
        op.shape.heads.head_dim,
        op.shape.rows() * op.shape.heads.n_heads,
    );
    if rows == 0 {
        return CallLaunches::default();
    }
    let wide = call.reads.iter().all(|r| r.offset.is_multiple_of(WIDE));
    let entry = match (head_dim, wide) {
        (32, true) => entry!(op.math, "attention_delta", "_d32"),
        (64, true) => entry!(op.math, "attention_delta", "_d64"),
        (128, true) => entry!(op.math, "attention_delta", "_d128"),
        _ => entry!(op.math, "attention_delta", "_any"),
    };
    let threads_per_row = match (head_dim, wide) {
        (32 | 64 | 128, true) => head_dim * op.math.storage().size() / WIDE,
        _ => 32,
    };
    // One row a thread while that is what fills the device, then as many as a thread has under way.
    let blocks = rows.div_ceil(DELTA_THREADS / threads_per_row);
    let enough = 8 * device.multiprocessors as usize;
    let blocks = blocks.min(enough.max(blocks.div_ceil(DELTA_UNDER_WAY)));
    let regions = call.reads.iter().chain(&call.writes);
    let mut args: Vec<Arg> = regions.map(|&region| Arg::Region(region)).collect();
    args.extend([Arg::U32(rows as u32), Arg::U32(head_dim as u32)]);
    let launch = KernelLaunch {
        entry,
        grid: [blocks as u32, 1, 1],
        block: [DELTA_THREADS as u32, 1, 1],
        shared_bytes: 0,
        args,
    };
    launch.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::rope::Heads;
    use crate::op::{Op, OpCall, Slot};

    const DEVICE: DeviceShape = DeviceShape {
        multiprocessors: 132,
        shared_bytes_per_block: 232_448,
        warpgroups: true,
    };

    fn shape(
        batch: usize,
        seq_len: usize,
        [n_heads, n_kv_heads, head_dim]: [usize; 3],
    ) -> AttentionShape {
        AttentionShape {
            batch,
            seq_len,
            heads: Heads {
                n_heads,
                n_kv_heads,
                head_dim,
            },
        }
    }

    /// The op with every operand at `offset`.
    fn placed<T: Clone + Into<Op>>(typed: T, offset: usize) -> (T, PlacedCall) {
        let op: Op = typed.clone().into();
        let signature = op.rule().signature();
        let place = |n: usize| vec![Region { offset, bytes: 4 }; n];
        let slots = |n: usize| vec![Slot(0); n];
        let (reads, writes) = (signature.reads.len(), signature.writes.len());
        let call = OpCall {
            op,
            reads: slots(reads),
            writes: slots(writes),
        };
        let call = PlacedCall {
            call,
            reads: place(reads),
            writes: place(writes),
        };
        (typed, call)
    }

    /// What the four passes of a shape launch.
    fn passes(shape: AttentionShape, offset: usize) -> [CallLaunches; 4] {
        let math = Math::F32;
        let (op, call) = placed(Attention { math, shape }, offset);
        let first = forward(&op, &call, &DEVICE);
        let (op, call) = placed(AttentionDelta { math, shape }, offset);
        let second = delta(&op, &call, &DEVICE);
        let (op, call) = placed(AttentionGradQuery { math, shape }, offset);
        let third = grad_query(&op, &call, &DEVICE);
        let (op, call) = placed(AttentionGradKeyValue { math, shape }, offset);
        [first, second, third, grad_key_value(&op, &call, &DEVICE)]
    }

    /// The four launches of a shape.
    fn launches(shape: AttentionShape, offset: usize) -> [KernelLaunch; 4] {
        passes(shape, offset).map(|mut pass| pass.launches.remove(0))
    }

    #[test]
    fn kernels_follow_size_and_alignment() {
        let entries = |shape, offset| launches(shape, offset).map(|l| l.entry);
        let large = entries(shape(8, 1024, [12, 12, 64]), 256);
        assert_eq!(large[0], "attention_f32_d64");
        assert_eq!(large[1], "attention_delta_f32_d64");
        assert_eq!(large[2], "attention_grad_query_f32_d64");
        assert_eq!(large[3], "attention_grad_key_value_f32_d64");
        let small = entries(shape(32, 32, [4, 2, 32]), 256);
        assert_eq!(small[0], "attention_f32_d32_small");
        assert_eq!(small[2], "attention_grad_query_f32_d32_small");
        assert_eq!(small[3], "attention_grad_key_value_f32_d32_small");
        for any in [
            entries(shape(8, 1024, [12, 12, 64]), 4),
            entries(shape(8, 1024, [12, 12, 48]), 256),
        ] {
            assert!(
                any.iter().all(|entry| entry.ends_with("_f32_any")),
                "{any:?}"
            );
        }
    }

    #[test]
    fn blocks_cover_all_rows_and_fit_the_device() {
        for head_dim in (2..=256).step_by(2) {
            for (batch, seq_len) in [(1, 1), (2, 33), (8, 1024), (1, 32_768)] {
                for offset in [4, 256] {
                    let shape = shape(batch, seq_len, [6, 2, head_dim]);
                    let [first, _, third, last] = launches(shape, offset);
                    for (launch, kernels) in [
                        (first, &FORWARD),
                        (third, &GRAD_QUERY),
                        (last, &GRAD_KEY_VALUE),
                    ] {
                        let kernel = kernels.iter().find(|k| k.entry == launch.entry).unwrap();
                        assert!(launch.grid[1] as usize * kernel.rows >= seq_len);
                        assert!((launch.grid[1] as usize - 1) * kernel.rows < seq_len);
                        assert!(launch.shared_bytes <= DEVICE.shared_bytes_per_block);
                    }
                }
            }
        }
    }

    #[test]
    fn an_empty_batch_launches_nothing() {
        for pass in passes(shape(0, 8, [2, 1, 4]), 0) {
            assert_eq!(pass, CallLaunches::default());
        }
    }
}
