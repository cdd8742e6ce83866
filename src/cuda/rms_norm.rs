//! Launches of the RMS norm and its gradient.

use super::call::{Arg, CallLaunches, DeviceShape, KernelLaunch};
use super::rows::{Cut, aligned, by_fours, entry, no_tokens, number, numbers, one, shared_of_one};
use crate::layout::{PlacedCall, Region};
use crate::op::Store;
use crate::op::rms_norm::{RmsNorm, RmsNormGrad};
use crate::shape::Math;

/// Rows of a block where a warp serves a row.
const ROWS: usize = 4;

/// How the forward pass holds a row: entries without and with the residual.
fn forward_entry(op: &RmsNorm, operands: &[Region]) -> &'static str {
    let (math, quads) = (op.math, aligned(op.d_model, operands));
    match (quads, op.d_model, op.residual) {
        (false, _, false) => entry!(math, "rms_norm", ""),
        (false, _, true) => entry!(math, "rms_norm", "_residual"),
        (true, 0..=256, false) => entry!(math, "rms_norm", "_quads_256"),
        (true, 0..=256, true) => entry!(math, "rms_norm", "_residual_quads_256"),
        (true, 257..=1024, false) => entry!(math, "rms_norm", "_quads_1024"),
        (true, 257..=1024, true) => entry!(math, "rms_norm", "_residual_quads_1024"),
        (true, 1025..=2048, false) => entry!(math, "rms_norm", "_quads_2048"),
        (true, 1025..=2048, true) => entry!(math, "rms_norm", "_residual_quads_2048"),
        (true, _, false) => entry!(math, "rms_norm", "_quads"),
        (true, _, true) => entry!(math, "rms_norm", "_residual_quads"),
    }
}

/// The norm of every row, of `x` or of `x + delta`.
pub fn forward(op: &RmsNorm, call: &PlacedCall, _device: &DeviceShape) -> CallLaunches {
    if op.d_model == 0 {
        return CallLaunches::default();
    }
    let operands: Vec<Region> = call.reads.iter().chain(&call.writes).copied().collect();
    // All but the last, which holds one number a row.
    let entry = forward_entry(op, &operands[..operands.len() - 1]);
    let mut args: Vec<Arg> = operands.into_iter().map(Arg::Region).collect();
    args.extend(numbers([op.rows, op.d_model]));
    args.push(Arg::F32(op.eps));
    one(
        entry,
        [op.rows.div_ceil(ROWS), 1],
        [number(32 * ROWS), 1],
        args,
    )
}

/// The flag of a kernel that writes a copy of the gradient.
const COPY: usize = 2;
/// Warps of a block that reads its rows from memory.
const WARPS_UNSTAGED: usize = 16;

/// How a block serves the rows of a piece from shared memory: a row of it for each warp, and one for the chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Relay {
    warps: usize,
    bytes: usize,
}

impl Relay {
    /// Wanted in this order while a block's rows fit; more do not bring the rows faster.
    const WARPS: [usize; 4] = [8, 6, 4, 2];
    /// Bytes of the barriers at which warps hand on the chains, one for each of the most warps.
    const BARRIERS: usize = 8 * Self::WARPS[0];

    /// The relay of a call; `None` where not even two rows fit.
    fn of(op: &RmsNormGrad, device: &DeviceShape) -> Option<Relay> {
        let mut relays = Self::WARPS.into_iter().map(|warps| Relay {
            warps,
            bytes: Self::BARRIERS + (warps * Self::row_bytes(op) + 4) * op.d_model,
        });
        relays.find(|relay| relay.bytes <= shared_of_one(device))
    }

    /// Bytes of an element of a row: of r, of dh, and of what is added to.
    fn row_bytes(op: &RmsNormGrad) -> usize {
        4 + op.math.storage().size() + 4 * usize::from(op.store == Store::Add)
    }

    fn entry(d_model: usize, math: Math) -> &'static str {
        match d_model {
            768 => entry!(math, "rms_norm_grad", "_relay_768"),
            1024 => entry!(math, "rms_norm_grad", "_relay_1024"),
            2048 => entry!(math, "rms_norm_grad", "_relay_2048"),
            _ => entry!(math, "rms_norm_grad", "_relay"),
        }
    }

    /// The kernel of rows whose weight has no gradient, for the sizes that a thread holds in registers.
    fn rows_entry(d_model: usize, math: Math) -> Option<&'static str> {
        match d_model {
            768 => Some(entry!(math, "rms_norm_grad", "_rows_768")),
            1024 => Some(entry!(math, "rms_norm_grad", "_rows_1024")),
            2048 => Some(entry!(math, "rms_norm_grad", "_rows_2048")),
            _ => None,
        }
    }
}

/// Warps of a block of such rows, and its rows.
const RELAY_WARPS: usize = 4;
const RELAY_ROWS: usize = 8;

/// Threads and rows of a block where some blocks serve rows and others the chains of a piece and column a thread.
const SPLIT_THREADS: usize = 256;
const SPLIT_ROWS: usize = 8;
/// The most tokens and elements for which these kinds of block are told apart: dh and r are then read twice, from
/// the L2 cache.
const SPLIT_TOKENS: usize = 2048;
const SPLIT_ELEMENTS: usize = 1 << 21;

/// The gradient's operands as its kernels take them.
struct Operands {
    /// dh, r, weight, rstd, dr, and where the copy of dr goes, which is dr itself where there is none.
    regions: [Region; 6],
    dweight: Option<Region>,
    flags: usize,
}

impl Operands {
    fn of(op: &RmsNormGrad, call: &PlacedCall) -> Operands {
        let [dh, r, weight, rstd] = [0, 1, 2, 3].map(|i| call.reads[i]);
        let dr = call.writes[0];
        let copy = if op.delta_grad { call.writes[1] } else { dr };
        let dweight = call.writes.get(1 + usize::from(op.delta_grad));
        Operands {
            regions: [dh, r, weight, rstd, dr, copy],
            dweight: dweight.copied().filter(|_| op.weight_grad),
            flags: usize::from(op.store == Store::Add) + COPY * usize::from(op.delta_grad),
        }
    }

    /// Whether all but rstd can be read four elements at once.
    fn quads(&self, d_model: usize) -> bool {
        let [dh, r, weight, _, dr, copy] = self.regions;
        aligned(d_model, &[dh, r, weight, dr, copy])
    }

    /// Whether rows can be copied: those of dh by fours, those of f32 by 16 bytes.
    fn copied(&self, op: &RmsNormGrad) -> bool {
        self.quads(op.d_model) && by_fours(op.d_model, op.math, &self.regions[..1])
    }

    /// The regions as arguments.
    fn args(&self) -> Vec<Arg> {
        let regions = self.regions.iter().chain(&self.dweight);
        regions.map(|&region| Arg::Region(region)).collect()
    }
}

/// Whether some blocks serve rows and others the chains: for a small call of aligned rows.
fn is_split(op: &RmsNormGrad, operands: &Operands) -> bool {
    let (d, cut) = (op.d_model, Cut::new(&op.sum));
    let small = cut.tokens <= SPLIT_TOKENS && cut.tokens * d <= SPLIT_ELEMENTS;
    // The chains read `rstd` by fours too.
    let rstd = operands.regions[3];
    let quads = operands.quads(d) && rstd.offset.is_multiple_of(16);
    small && quads && cut.grains() == 1 && cut.piece.is_multiple_of(4)
}

/// The input gradient alone.
fn grad_rows(op: &RmsNormGrad, operands: &Operands) -> CallLaunches {
    if let Some(launches) = grad_rows_by_relay(op, operands) {
        return launches;
    }
    let entry = match operands.quads(op.d_model) {
        true => entry!(op.math, "rms_norm_grad", "_rows_quads"),
        false => entry!(op.math, "rms_norm_grad", "_rows"),
    };
    let mut args = operands.args();
    args.extend(numbers([op.sum.tokens, op.d_model, operands.flags]));
    let blocks = op.sum.tokens.div_ceil(ROWS);
    one(entry, [blocks, 1], [number(32 * ROWS), 1], args)
}

/// The input gradient of every row and, where it is asked for, the weight gradient.
pub fn grad(op: &RmsNormGrad, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    if op.d_model == 0 {
        return CallLaunches::default();
    }
    if let Some(sum) = ByPieces::of(op, call) {
        return sum.launches(device);
    }
    let operands = Operands::of(op, call);
    match operands.dweight {
        Some(dweight) => no_tokens(&[dweight]),
        None => grad_rows(op, &operands),
    }
}

/// The same for the sizes that have a kernel of their own.
fn grad_rows_by_relay(op: &RmsNormGrad, operands: &Operands) -> Option<CallLaunches> {
    let entry = Relay::rows_entry(op.d_model, op.math).filter(|_| operands.copied(op))?;
    let mut args = operands.args();
    args.extend(numbers([
        op.sum.tokens,
        RELAY_ROWS,
        op.d_model,
        operands.flags,
    ]));
    let blocks = op.sum.tokens.div_ceil(RELAY_ROWS);
    let mut launches = one(entry, [blocks, 1], [number(32 * RELAY_WARPS), 1], args);
    for launch in &mut launches.launches {
        launch.shared_bytes = number(RELAY_WARPS * Relay::row_bytes(op) * op.d_model);
    }
    Some(launches)
}

/// Columns of a weight that a block folds, its threads for one tree, the most pieces of that, and the most weights of a
/// launch.
const FOLD_COLUMNS: usize = 32;
const FOLD_THREADS: u32 = 256;
const FOLD_PIECES: usize = 4096;
pub(super) const FOLDS: usize = 16;

/// The size of a weight's sum over pieces: the rows of partial sums that are folded into a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SumSize {
    cut: Cut,
    d_model: usize,
}

impl SumSize {
    /// Rows of partial sums, some of them unused where the last grain has fewer pieces.
    fn pieces(self) -> usize {
        self.cut.grains() * self.cut.pieces()
    }

    /// Bytes of the partial sums.
    pub fn bytes(self) -> usize {
        self.pieces() * self.d_model * 4
    }

    /// The launch that folds the partial sums of 1 to [`FOLDS`] gradients, which lie one behind the other.
    pub fn fold(self, partials: Arg, gradients: &[Region]) -> KernelLaunch {
        let columns = self.d_model.div_ceil(FOLD_COLUMNS);
        let one_tree = self.cut.grains() == 1 && self.pieces() <= FOLD_PIECES;
        let mut args = vec![partials];
        match one_tree {
            true => args.extend(numbers([self.pieces()])),
            false => args.extend(self.cut.numbers()),
        }
        args.extend(numbers([self.d_model]));
        // What stands behind the last gradient is not read.
        let last = gradients.last().copied().into_iter();
        let padded = gradients.iter().copied().chain(last.cycle());
        args.extend(padded.take(FOLDS).map(Arg::Region));
        KernelLaunch {
            entry: match one_tree {
                true => "rms_norm_grad_folds_f32",
                false => "rms_norm_grad_folds_f32_trees",
            },
            grid: [number(columns), number(gradients.len()), 1],
            block: [if one_tree { FOLD_THREADS } else { 32 }, 1, 1],
            shared_bytes: 0,
            args,
        }
    }
}

/// Both gradients in two launches: a block a piece, which leaves a row of partial sums, then the sum over the pieces.
pub(super) struct ByPieces<'c> {
    op: &'c RmsNormGrad,
    operands: Operands,
    pub size: SumSize,
    /// The weight's gradient.
    pub gradient: Region,
}

impl<'c> ByPieces<'c> {
    /// `None` for calls without a weight gradient or without tokens.
    pub fn of(op: &'c RmsNormGrad, call: &PlacedCall) -> Option<Self> {
        let operands = Operands::of(op, call);
        let gradient = operands.dweight?;
        let empty = op.d_model == 0 || op.sum.tokens == 0;
        let size = SumSize {
            cut: Cut::new(&op.sum),
            d_model: op.d_model,
        };
        (!empty).then_some(ByPieces {
            op,
            operands,
            size,
            gradient,
        })
    }

    /// The kernel that leaves the partial sums, its blocks, warps of each, and bytes of shared memory.
    fn form(&self, device: &DeviceShape) -> (&'static str, usize, usize, usize) {
        let (op, operands) = (self.op, &self.operands);
        let (d, math, pieces) = (op.d_model, op.math, self.size.pieces());
        if is_split(op, operands) {
            let chains = (pieces * d).div_ceil(SPLIT_THREADS);
            let blocks = chains + op.sum.tokens.div_ceil(SPLIT_ROWS);
            let entry = entry!(math, "rms_norm_grad", "_split");
            return (entry, blocks, SPLIT_THREADS / 32, 0);
        }
        if let Some(relay) = Relay::of(op, device).filter(|_| operands.copied(op)) {
            return (Relay::entry(d, math), pieces, relay.warps, relay.bytes);
        }
        let entry = match operands.quads(d) {
            true => entry!(math, "rms_norm_grad", "_quads"),
            false => entry!(math, "rms_norm_grad", ""),
        };
        (entry, pieces, WARPS_UNSTAGED, 0)
    }

    /// The launch that leaves the partial sums at `partials`.
    pub fn pieces(&self, partials: Arg, device: &DeviceShape) -> KernelLaunch {
        let (entry, blocks, warps, shared_bytes) = self.form(device);
        let mut args: Vec<Arg> = self.operands.regions.map(Arg::Region).to_vec();
        args.extend(self.size.cut.numbers());
        args.extend(numbers([self.op.d_model, self.operands.flags]));
        args.push(partials);
        KernelLaunch {
            entry,
            grid: [number(blocks), 1, 1],
            block: [number(32 * warps), 1, 1],
            shared_bytes: number(shared_bytes),
            args,
        }
    }

    /// Both launches, one after the other.
    fn launches(&self, device: &DeviceShape) -> CallLaunches {
        let partials = Arg::Workspace { offset: 0 };
        let fold = self.size.fold(partials, &[self.gradient]);
        CallLaunches {
            launches: vec![self.pieces(partials, device), fold],
            workspace_bytes: self.size.bytes(),
            zeroed_bytes: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::call::H200;
    use crate::num::tree::TokenSum;
    use crate::op::OpCall;
    use crate::shape::Math;

    fn grad_op((tokens, d_model): (usize, usize), store: Store, math: Math) -> RmsNormGrad {
        RmsNormGrad {
            d_model,
            sum: TokenSum {
                tokens,
                grain: tokens,
                piece: 32,
            },
            store,
            weight_grad: true,
            delta_grad: false,
            math,
        }
    }

    #[test]
    fn as_many_rows_are_under_way_as_fit() {
        let warps = |d_model, store, math| {
            let op = grad_op((8192, d_model), store, math);
            let relay = Relay::of(&op, &H200)?;
            assert!(relay.bytes < H200.shared_bytes_per_block as usize);
            Some(relay.warps)
        };
        assert_eq!(warps(768, Store::Add, Math::F32), Some(8));
        assert_eq!(warps(2048, Store::Add, Math::Bf16), Some(8));
        assert_eq!(warps(4096, Store::Add, Math::Bf16), Some(4));
        assert_eq!(warps(4096, Store::Assign, Math::Bf16), Some(8));
        assert_eq!(warps(8192, Store::Add, Math::F32), Some(2));
        assert_eq!(warps(16_384, Store::Add, Math::F32), None);
    }

    #[test]
    fn rows_alone_stream_where_their_size_has_a_kernel() {
        let entry = |d_model, start, math| {
            let op = RmsNormGrad {
                weight_grad: false,
                ..grad_op((100, d_model), Store::Add, math)
            };
            let launch = grad(&op, &grad_call(&op, start), &H200).launches.remove(0);
            (launch.entry, launch.grid[0], launch.shared_bytes)
        };
        let streamed = ("rms_norm_grad_bf16_rows_1024", 13, 4 * 10 * 1024);
        assert_eq!(entry(1024, 0, Math::Bf16), streamed);
        let streamed = ("rms_norm_grad_f32_rows_768", 13, 4 * 12 * 768);
        assert_eq!(entry(768, 16, Math::F32), streamed);
        assert_eq!(entry(768, 4, Math::F32), ("rms_norm_grad_f32_rows", 25, 0));
        assert_eq!(
            entry(1028, 0, Math::F16),
            ("rms_norm_grad_f16_rows_quads", 25, 0)
        );
    }

    /// A call whose operands start at `start`.
    fn grad_call(op: &RmsNormGrad, start: usize) -> PlacedCall {
        let region = Region {
            offset: start,
            bytes: 64,
        };
        PlacedCall {
            reads: vec![region; 4],
            writes: vec![region; 1 + usize::from(op.weight_grad)],
            call: OpCall {
                op: op.clone().into(),
                reads: Vec::new(),
                writes: Vec::new(),
            },
        }
    }

    /// The kernel of both gradients of a call over `tokens` rows, operands from `start` on.
    fn grad_entry(size: (usize, usize), start: usize, math: Math) -> &'static str {
        let op = grad_op(size, Store::Assign, math);
        grad(&op, &grad_call(&op, start), &H200).launches[0].entry
    }

    #[test]
    fn small_gradients_are_split_by_kind_and_large_ones_by_piece() {
        let f32 = |tokens, d_model, start| grad_entry((tokens, d_model), start, Math::F32);
        assert_eq!(f32(1024, 128, 0), "rms_norm_grad_f32_split");
        assert_eq!(f32(2048, 1024, 0), "rms_norm_grad_f32_split");
        assert_eq!(f32(1024, 128, 4), "rms_norm_grad_f32");
        assert_eq!(f32(8192, 768, 0), "rms_norm_grad_f32_relay_768");
        assert_eq!(f32(2048, 1028, 0), "rms_norm_grad_f32_relay");
        assert_eq!(f32(8192, 16_384, 0), "rms_norm_grad_f32_quads");
        let bf16 = |tokens, d_model, start| grad_entry((tokens, d_model), start, Math::Bf16);
        assert_eq!(bf16(1024, 128, 0), "rms_norm_grad_bf16_split");
        assert_eq!(bf16(8192, 768, 0), "rms_norm_grad_bf16_relay_768");
        assert_eq!(bf16(8192, 772, 0), "rms_norm_grad_bf16_relay");
    }

    #[test]
    fn the_entry_follows_width_alignment_and_precision() {
        let entry = |d_model, offset, residual, math| {
            let op = RmsNorm {
                rows: 1,
                d_model,
                eps: 1e-6,
                residual,
                math,
            };
            forward_entry(&op, &[Region { offset, bytes: 64 }])
        };
        assert_eq!(
            entry(128, 0, true, Math::F32),
            "rms_norm_f32_residual_quads_256"
        );
        assert_eq!(entry(768, 0, false, Math::Tf32), "rms_norm_f32_quads_1024");
        assert_eq!(entry(768, 4, false, Math::F32), "rms_norm_f32");
        assert_eq!(
            entry(2048, 0, false, Math::Bf16),
            "rms_norm_bf16_quads_2048"
        );
        assert_eq!(entry(2052, 0, false, Math::Bf16), "rms_norm_bf16_quads");
        assert_eq!(entry(6, 0, true, Math::F16), "rms_norm_f16_residual");
    }
}
