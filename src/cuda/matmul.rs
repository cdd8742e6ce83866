//! Linear layers on the GPU: which kernel of `ptx/matmul*_f32.cu` computes a product, and on what grid;
//! the tensor-core domains have kernels and grids of their own.
//!
//! A kernel computes whole chains, so the choice of a tile changes no bit.

use super::call::{Arg, CallLaunches, DeviceShape, KernelLaunch};
use super::matmul_tensor as tensor;
use super::matmul_warpgroup::Product;
use super::pieces::{WeightTiles, Work, is_one_tree, pieces, whole_args};
use super::rows::{aligned, by_vectors, number, numbers, one, regions};
use crate::layout::PlacedCall;
use crate::num::tensor_step::Kind;
use crate::op::Store;
use crate::op::matmul::{Matmul, MatmulGradInput, MatmulGradWeight};

/// Floats that pad a row of shared memory whose terms are written transposed.
const PAD_FLOATS: usize = 4;

/// Tiles of which a block computes all pieces, a warp a piece: kernel, rows and columns, and the cycles for
/// a term of four warps, one for each scheduler of a multiprocessor.
const WHOLE: [(&str, [usize; 2], usize); 3] = [
    ("matmul_grad_weight_f32_whole_24x32", [24, 32], 35),
    ("matmul_grad_weight_f32_whole_16x32", [16, 32], 22),
    ("matmul_grad_weight_f32_whole_16x16", [16, 16], 15),
];

/// Terms that such a warp has in shared memory.
const WHOLE_TERMS: usize = 64;

/// Cycles in which blocks leave their pieces, count themselves in, and the last ones fold.
const FOLD_CYCLES: usize = 4000;

/// Threads of a block that folds whole products.
const FOLD_THREADS: u32 = 256;

/// A tile of the output that one block computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tile {
    T128x128,
    T128x64,
    T64x32,
    T32x32,
}

impl Tile {
    const ALL: [Tile; 4] = [Tile::T128x128, Tile::T128x64, Tile::T64x32, Tile::T32x32];

    /// Rows and columns.
    pub(super) fn extents(self) -> [usize; 2] {
        match self {
            Tile::T128x128 => [128, 128],
            Tile::T128x64 => [128, 64],
            Tile::T64x32 => [64, 32],
            Tile::T32x32 => [32, 32],
        }
    }

    pub(super) fn outputs(self) -> usize {
        let [rows, columns] = self.extents();
        rows * columns
    }

    fn threads(self) -> u32 {
        match self {
            Tile::T128x128 => 256,
            _ => 128,
        }
    }

    /// Terms of a stage in dynamic shared memory; small tiles have theirs in static memory.
    fn stage_terms(self, vectors: bool) -> usize {
        match (self, vectors) {
            (Tile::T128x128 | Tile::T128x64, true) => 32,
            (Tile::T128x128 | Tile::T128x64, false) => 8,
            _ => 0,
        }
    }

    /// Cycles a multiprocessor needs for one term of a tile: the multiply-adds, 128 a cycle, and what
    /// the loads from shared memory and the loop add to them.
    pub(super) fn cycles(self) -> usize {
        match self {
            Tile::T128x128 => 146,
            Tile::T128x64 => 75,
            Tile::T64x32 => 21,
            Tile::T32x32 => 13,
        }
    }

    /// The same for the only block of a multiprocessor, whose waits no other block fills.
    pub(super) fn cycles_alone(self) -> usize {
        match self {
            Tile::T128x128 => 175,
            Tile::T128x64 => 105,
            Tile::T64x32 => 24,
            Tile::T32x32 => 15,
        }
    }
}

/// A product by the f32 kernels.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnWork {
    pub work: Work,
    /// How many of the two operands pass through registers on their way to shared memory, because their
    /// terms are contiguous; each adds a pad to its rows there.
    pub transposed: usize,
}

impl OwnWork {
    /// Bytes of dynamic shared memory: two stages of both operands.
    fn shared_bytes(&self, tile: Tile) -> usize {
        let [rows, columns] = tile.extents();
        let floats_of_term = rows + columns + self.transposed * PAD_FLOATS;
        2 * tile.stage_terms(self.work.vectors) * floats_of_term * size_of::<f32>()
    }

    /// Cycles for one term of all tiles of the busiest multiprocessor.
    fn cycles(&self, tile: Tile, device: &DeviceShape) -> usize {
        let of_tile = [tile.cycles_alone(), tile.cycles()];
        self.work.cycles(tile.extents(), of_tile, device)
    }

    /// The launch in pieces of `terms` with all pieces of a tile in one block, if a block a multiprocessor
    /// is enough for that and a split into a block a piece would take longer.
    fn whole(&self, terms: usize, device: &DeviceShape) -> Option<KernelLaunch> {
        let work = &self.work;
        let fits = |extents| work.tiles(extents) <= device.multiprocessors as usize;
        let all = WHOLE.into_iter().filter(|&(_, extents, _)| fits(extents));
        let (entry, extents, cycles) = all.min_by_key(|&(.., cycles)| cycles)?;
        let split = self.cycles(self.tile(device), device) * terms + FOLD_CYCLES;
        let fast = cycles * work.pieces.div_ceil(4) * terms < split;
        let floats = work.pieces * WHOLE_TERMS * (extents[0] + extents[1]);
        let shared = floats * size_of::<f32>();
        let possible = work.vectors && (2..=8).contains(&work.pieces);
        let launch = || KernelLaunch {
            entry,
            grid: [number(work.tiles(extents)), 1, 1],
            block: [number(32 * work.pieces), 1, 1],
            shared_bytes: number(shared),
            args: Vec::new(),
        };
        (possible && fast && shared <= device.shared_bytes_per_block as usize).then(launch)
    }

    /// The tile with which the busiest multiprocessor is done first; the larger of two equals.
    pub(super) fn tile(&self, device: &DeviceShape) -> Tile {
        let cycles = |tile: &Tile| self.cycles(*tile, device);
        // Operands that only 4-byte accesses reach are rare: they have kernels at both ends alone.
        let tiles = Tile::ALL
            .into_iter()
            .filter(|tile| self.work.vectors || matches!(tile, Tile::T128x128 | Tile::T32x32))
            .filter(|tile| self.shared_bytes(*tile) <= device.shared_bytes_per_block as usize);
        tiles.min_by_key(cycles).unwrap_or(Tile::T32x32)
    }
}

/// The kernels of one op: by tile for operands aligned to 16 bytes, and for any others.
struct Entries {
    aligned: [&'static str; 4],
    any: [&'static str; 2],
}

macro_rules! entries {
    ($stem:literal) => {
        Entries {
            aligned: [
                concat!($stem, "_f32_128x128"),
                concat!($stem, "_f32_128x64"),
                concat!($stem, "_f32_64x32"),
                concat!($stem, "_f32_32x32"),
            ],
            any: [
                concat!($stem, "_f32_128x128_any"),
                concat!($stem, "_f32_32x32_any"),
            ],
        }
    };
}

impl Entries {
    const FORWARD: Entries = entries!("matmul");
    const GRAD_INPUT: Entries = entries!("matmul_grad_input");
    const GRAD_WEIGHT: Entries = entries!("matmul_grad_weight");

    fn get(&self, tile: Tile, vectors: bool) -> &'static str {
        match (tile, vectors) {
            (Tile::T128x128, true) => self.aligned[0],
            (Tile::T128x64, _) => self.aligned[1],
            (Tile::T64x32, _) => self.aligned[2],
            (Tile::T32x32, true) => self.aligned[3],
            (Tile::T128x128, false) => self.any[0],
            (Tile::T32x32, false) => self.any[1],
        }
    }

    /// The launch with the tiles that are done first.
    fn launch_best(
        &self,
        (work, transposed): (Work, usize),
        device: &DeviceShape,
        args: Vec<Arg>,
    ) -> KernelLaunch {
        let own = OwnWork { work, transposed };
        launch(self, &own, own.tile(device), args)
    }
}

fn launch(entries: &Entries, own: &OwnWork, tile: Tile, args: Vec<Arg>) -> KernelLaunch {
    let blocks = own.work.tiles(tile.extents()) * own.work.pieces;
    KernelLaunch {
        entry: entries.get(tile, own.work.vectors),
        grid: [number(blocks), 1, 1],
        block: [tile.threads(), 1, 1],
        shared_bytes: number(own.shared_bytes(tile)),
        args,
    }
}

/// `y = x · weightᵀ (+ bias)`; reads x, weight, bias, writes y.
pub fn forward(op: &Matmul, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    let (x, weight, y) = (call.reads[0], call.reads[1], call.writes[0]);
    if op.rows == 0 || op.n_out == 0 {
        return CallLaunches::default();
    }
    let product = Product::forward(op, call);
    if let Some(launch) = product.and_then(|product| product.alone(device)) {
        return launch.into();
    }
    let work = Work {
        m: op.rows,
        n: op.n_out,
        pieces: 1,
        vectors: by_vectors(op.n_in, op.math, &[x, weight]),
    };
    // Without a bias the kernel reads none; the argument must still be an address.
    let bias = call.reads.get(2).copied().filter(|_| op.bias);
    let mut args = regions([x, weight, bias.unwrap_or(y), y]).to_vec();
    let biased = usize::from(bias.is_some());
    args.extend(numbers([op.rows, op.n_in, op.n_out, biased]));
    let launch = match Kind::of(op.math) {
        Some(kind) => tensor::Entries::forward(kind).launch_best(&work, device, args),
        None => Entries::FORWARD.launch_best((work, 2), device, args),
    };
    launch.into()
}

/// The sizes of `dx = dy · weight`.
pub(super) fn input_work(op: &MatmulGradInput, call: &PlacedCall) -> Work {
    let (dy, weight) = (call.reads[0], call.reads[1]);
    Work {
        m: op.rows,
        n: op.n_in,
        pieces: 1,
        vectors: by_vectors(op.n_out, op.math, &[dy]) && by_vectors(op.n_in, op.math, &[weight]),
    }
}

/// The sizes of `dweight (+)= dyᵀ · x`.
pub(super) fn weight_work(op: &MatmulGradWeight, call: &PlacedCall) -> Work {
    let (dy, x) = (call.reads[0], call.reads[1]);
    let [_, pieces] = pieces(&op.sum);
    Work {
        m: op.n_out,
        n: op.n_in,
        pieces,
        vectors: by_vectors(op.n_out, op.math, &[dy]) && by_vectors(op.n_in, op.math, &[x]),
    }
}

/// `dx = dy · weight`; reads dy, weight, writes dx.
pub fn grad_input(op: &MatmulGradInput, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    let (dy, weight) = (call.reads[0], call.reads[1]);
    if op.rows == 0 || op.n_in == 0 {
        return CallLaunches::default();
    }
    if let Some(launch) = Product::grad_input(op, call).alone(device) {
        return launch.into();
    }
    let work = input_work(op, call);
    let mut args = regions([dy, weight, call.writes[0]]).to_vec();
    args.extend(numbers([op.rows, op.n_in, op.n_out]));
    let launch = match Kind::of(op.math) {
        Some(kind) => tensor::Entries::grad_input(kind).launch_best(&work, device, args),
        None => Entries::GRAD_INPUT.launch_best((work, 1), device, args),
    };
    launch.into()
}

/// `dweight (+)= dyᵀ · x` in f32, cut into pieces and grains; reads dy, x, writes dweight.
///
/// Where a block computes all pieces of a tile there is no workspace.
pub fn grad_weight(op: &MatmulGradWeight, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    if op.n_out == 0 || op.n_in == 0 {
        return CallLaunches::default();
    }
    let work = weight_work(op, call);
    if let Some(kind) = Kind::of(op.math) {
        return tensor::grad_weight(kind, &work, (op, call), device);
    }
    let own = OwnWork {
        work,
        transposed: 0,
    };
    let terms = op.sum.piece.min(op.sum.grain);
    let whole = own.whole(terms, device).filter(|_| is_one_tree(&op.sum));
    if let Some(mut launch) = whole {
        launch.args = whole_args(op, call);
        return launch.into();
    }
    let tile = own.tile(device);
    let tiles = WeightTiles {
        tiles: work.tiles(tile.extents()),
        outputs: tile.outputs(),
    };
    tiles.launches(op, call, |args| {
        launch(&Entries::GRAD_WEIGHT, &own, tile, args)
    })
}

/// Folds the products of the pieces that stand one after another, each `[n_out, n_in]`, at the
/// workspace's start, into dweight.
pub fn fold(op: &MatmulGradWeight, call: &PlacedCall, _: &DeviceShape) -> CallLaunches {
    let dweight = call.writes[0];
    let [pieces_of_grain, pieces] = pieces(&op.sum);
    let outputs = op.n_out * op.n_in;
    if outputs == 0 {
        return CallLaunches::default();
    }
    let (entry, elements) = match aligned(outputs, &[dweight]) {
        true => ("matmul_grad_weight_f32_fold", outputs / 4),
        false => ("matmul_grad_weight_f32_fold_any", outputs),
    };
    let mut args = vec![Arg::Workspace { offset: 0 }, Arg::Region(dweight)];
    let add = usize::from(op.store == Store::Add);
    args.extend(numbers([elements, pieces_of_grain, pieces, add]));
    let blocks = elements.div_ceil(FOLD_THREADS as usize);
    CallLaunches {
        workspace_bytes: pieces * outputs * size_of::<f32>(),
        ..one(entry, [blocks, 1], [FOLD_THREADS, 1], args)
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

    /// A call whose operands follow each other from `start` on.
    fn placed(op: impl Into<Op>, start: usize) -> PlacedCall {
        let op = op.into();
        let signature = op.rule().signature();
        let mut offset = start;
        let mut place = |elements: usize| {
            let bytes = elements * 4;
            let region = Region { offset, bytes };
            offset += bytes;
            region
        };
        PlacedCall {
            reads: signature
                .reads
                .iter()
                .map(|o| place(o.shape.elements()))
                .collect(),
            writes: signature
                .writes
                .iter()
                .map(|o| place(o.shape.elements()))
                .collect(),
            call: OpCall {
                op,
                reads: Vec::new(),
                writes: Vec::new(),
            },
        }
    }

    fn forward_entry(rows: usize, n_in: usize, n_out: usize, start: usize) -> (&'static str, u32) {
        let op = Matmul {
            math: Math::F32,
            rows,
            n_in,
            n_out,
            bias: false,
        };
        let made = forward(&op, &placed(op.clone(), start), &H200);
        (made.launches[0].entry, made.launches[0].grid[0])
    }

    #[test]
    fn large_products_take_large_tiles_and_small_ones_fill_the_gpu() {
        assert_eq!(
            forward_entry(8192, 768, 2304, 0),
            ("matmul_f32_128x128", 64 * 18)
        );
        assert_eq!(forward_entry(1024, 128, 128, 0), ("matmul_f32_32x32", 128));
        assert_eq!(forward_entry(1024, 128, 256, 0), ("matmul_f32_64x32", 128));
    }

    #[test]
    fn operands_that_vectors_cannot_reach_take_kernels_without_them() {
        assert_eq!(forward_entry(1024, 128, 128, 4).0, "matmul_f32_32x32_any");
        assert_eq!(forward_entry(1024, 127, 128, 0).0, "matmul_f32_32x32_any");
        assert_eq!(
            forward_entry(8192, 767, 2304, 0).0,
            "matmul_f32_128x128_any"
        );
    }

    fn weight_op(tokens: usize, grain: usize, piece: usize) -> MatmulGradWeight {
        MatmulGradWeight {
            math: Math::F32,
            n_in: 128,
            n_out: 384,
            sum: TokenSum {
                tokens,
                grain,
                piece,
            },
            store: Store::Assign,
        }
    }

    #[test]
    fn the_workspace_holds_a_counter_a_tile_and_all_partials() {
        let op = weight_op(2048, 2048, 128);
        let made = grad_weight(&op, &placed(op.clone(), 0), &H200);
        let [launch] = &made.launches[..] else {
            panic!("{} launches", made.launches.len());
        };
        let tiles = launch.grid[0] as usize / 16;
        assert_eq!(made.zeroed_bytes, (4 * tiles).next_multiple_of(256));
        let partials = made.workspace_bytes - made.zeroed_bytes;
        assert_eq!(partials, 16 * 384 * 128 * 4);
        let whole = weight_op(1024, 1024, 1024);
        let made = grad_weight(&whole, &placed(whole.clone(), 0), &H200);
        assert_eq!((made.workspace_bytes, made.zeroed_bytes), (0, 0));
    }

    #[test]
    fn a_block_folds_all_pieces_of_small_outputs_alone() {
        let made = |n_in, n_out, start| {
            let op = MatmulGradWeight {
                n_in,
                n_out,
                ..weight_op(1024, 1024, 128)
            };
            let launches = grad_weight(&op, &placed(op.clone(), start), &H200).launches;
            let kernel = launches[0]
                .entry
                .trim_start_matches("matmul_grad_weight_f32_");
            (kernel, launches[0].grid[0])
        };
        assert_eq!(made(128, 768, 0), ("whole_24x32", 128));
        assert_eq!(made(128, 384, 0), ("whole_16x32", 96));
        assert_eq!(made(128, 256, 0), ("whole_16x16", 128));
        assert_eq!(made(128, 128, 0), ("whole_16x16", 64));
        assert_eq!(made(128, 128, 4).0, "32x32_any");
        assert_eq!(made(768, 2048, 0).0, "128x128");
    }

    #[test]
    fn pieces_are_counted_over_ragged_grains() {
        let of = |tokens, grain, piece| pieces(&weight_op(tokens, grain, piece).sum);
        assert_eq!(of(100, 40, 16), [3, 8]);
        assert_eq!(of(100, 1000, 16), [7, 7]);
        assert_eq!(of(0, 40, 16), [1, 1]);
    }

    #[test]
    fn a_product_without_outputs_launches_nothing_and_one_without_terms_does() {
        let op = |rows, n_in| Matmul {
            math: Math::F32,
            rows,
            n_in,
            n_out: 4,
            bias: false,
        };
        let launches = |op: Matmul| forward(&op, &placed(op.clone(), 0), &H200).launches.len();
        assert_eq!(launches(op(0, 4)), 0);
        assert_eq!(launches(op(4, 0)), 1);
    }
}
