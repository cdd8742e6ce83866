//! Linear layers of the tensor-core domains on the GPU: which kernel of `ptx/matmul*_{bf16,f16,tf32}.cu`
//! computes a product, and on what grid.
//!
//! A kernel computes whole chains of steps, so the choice of a tile changes no bit.

use super::call::{Arg, CallLaunches, DeviceShape, KernelLaunch};
use super::pieces::{WeightTiles, Work, is_one_tree, whole_args};
use super::rows::{number, shared_of_two};
use crate::layout::PlacedCall;
use crate::num::tensor_step::Kind;
use crate::num::tree::TokenSum;
use crate::op::matmul::MatmulGradWeight;

/// Bytes of terms of a row or column in one stage of shared memory.
const STAGE_BYTES: usize = 128;

/// A tile of the output that one block computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tile {
    T128,
    T64,
    T32,
}

impl Tile {
    const ALL: [Tile; 3] = [Tile::T128, Tile::T64, Tile::T32];

    /// Rows, and as many columns.
    fn extent(self) -> usize {
        match self {
            Tile::T128 => 128,
            Tile::T64 => 64,
            Tile::T32 => 32,
        }
    }

    fn threads(self) -> u32 {
        match self {
            Tile::T128 => 256,
            _ => 128,
        }
    }

    /// Bytes of dynamic shared memory: all stages of both operands.
    fn shared_bytes(self) -> usize {
        let stages = match self {
            Tile::T128 => 3,
            _ => 4,
        };
        stages * 2 * self.extent() * STAGE_BYTES
    }

    /// Cycles a multiprocessor needs for one stage of a tile among other blocks: mostly what passes
    /// through shared memory.
    fn cycles(self) -> usize {
        match self {
            Tile::T128 => 1100,
            Tile::T64 => 390,
            Tile::T32 => 230,
        }
    }

    /// The same for the only block of a multiprocessor, whose waits no other block fills.
    fn cycles_alone(self) -> usize {
        match self {
            Tile::T128 => 1300,
            Tile::T64 => 600,
            Tile::T32 => 360,
        }
    }
}

/// The tile with which the busiest multiprocessor is done first; the larger of two equals.
fn best_tile(work: &Work, device: &DeviceShape) -> Tile {
    let cycles = |tile: &Tile| {
        let of_tile = [tile.cycles_alone(), tile.cycles()];
        work.cycles([tile.extent(); 2], of_tile, device)
    };
    // Operands that no 16-byte access reaches are rare: they have kernels at both ends alone.
    let tiles = Tile::ALL
        .into_iter()
        .filter(|tile| work.vectors || *tile != Tile::T64)
        .filter(|tile| tile.shared_bytes() <= device.shared_bytes_per_block as usize);
    tiles.min_by_key(cycles).unwrap_or(Tile::T32)
}

/// The kernels of one op and kind: by tile for operands aligned to 16 bytes, and for any others.
pub(super) struct Entries {
    aligned: [&'static str; 3],
    any: [&'static str; 2],
}

macro_rules! entries {
    ($stem:literal) => {
        Entries {
            aligned: [
                concat!($stem, "_128x128"),
                concat!($stem, "_64x64"),
                concat!($stem, "_32x32"),
            ],
            any: [concat!($stem, "_128x128_any"), concat!($stem, "_32x32_any")],
        }
    };
}

impl Entries {
    pub(super) fn forward(kind: Kind) -> Entries {
        match kind {
            Kind::Bf16 => entries!("matmul_bf16"),
            Kind::F16 => entries!("matmul_f16"),
            Kind::Tf32 => entries!("matmul_tf32"),
        }
    }

    pub(super) fn grad_input(kind: Kind) -> Entries {
        match kind {
            Kind::Bf16 => entries!("matmul_grad_input_bf16"),
            Kind::F16 => entries!("matmul_grad_input_f16"),
            Kind::Tf32 => entries!("matmul_grad_input_tf32"),
        }
    }

    fn grad_weight(kind: Kind) -> Entries {
        match kind {
            Kind::Bf16 => entries!("matmul_grad_weight_bf16"),
            Kind::F16 => entries!("matmul_grad_weight_f16"),
            Kind::Tf32 => entries!("matmul_grad_weight_tf32"),
        }
    }

    fn get(&self, tile: Tile, vectors: bool) -> &'static str {
        match (tile, vectors) {
            (Tile::T128, true) => self.aligned[0],
            (Tile::T64, _) => self.aligned[1],
            (Tile::T32, true) => self.aligned[2],
            (Tile::T128, false) => self.any[0],
            (Tile::T32, false) => self.any[1],
        }
    }

    /// The launch with the tiles that are done first.
    pub(super) fn launch_best(
        &self,
        work: &Work,
        device: &DeviceShape,
        args: Vec<Arg>,
    ) -> KernelLaunch {
        self.launch(work, best_tile(work, device), args)
    }

    fn launch(&self, work: &Work, tile: Tile, args: Vec<Arg>) -> KernelLaunch {
        let blocks = work.tiles([tile.extent(); 2]) * work.pieces;
        KernelLaunch {
            entry: self.get(tile, work.vectors),
            grid: [number(blocks), 1, 1],
            block: [tile.threads(), 1, 1],
            shared_bytes: number(tile.shared_bytes()),
            args,
        }
    }
}

/// Rows, and as many columns, of a tile of which a block computes all pieces, a warp a piece; the stages of
/// such a warp, and the longest piece for which that pays.
const WHOLE_EXTENT: usize = 32;
const WHOLE_STAGES: usize = 3;
const WHOLE_TERMS: usize = 256;

/// Bytes of dynamic shared memory of a block that has so many such warps.
fn whole_shared_bytes(warps: usize) -> usize {
    warps * WHOLE_STAGES * 2 * WHOLE_EXTENT * STAGE_BYTES
}

/// Whether a block can compute all pieces of a tile, and a block a multiprocessor is enough for that.
fn is_whole(work: &Work, sum: &TokenSum, device: &DeviceShape) -> bool {
    let short = sum.piece.min(sum.grain) <= WHOLE_TERMS && is_one_tree(sum);
    let few = work.tiles([WHOLE_EXTENT; 2]) <= device.multiprocessors as usize;
    work.vectors && short && few && (2..=8).contains(&work.pieces)
}

/// The launch with all pieces of a tile in one block, where these are short: nothing then passes through the
/// workspace, and no block waits for another.
fn whole(kind: Kind, work: &Work, sum: &TokenSum, device: &DeviceShape) -> Option<KernelLaunch> {
    let blocks = work.tiles([WHOLE_EXTENT; 2]);
    let shared = whole_shared_bytes(work.pieces);
    let fits = shared <= device.shared_bytes_per_block as usize;
    let launch = || KernelLaunch {
        entry: match kind {
            Kind::Bf16 => "matmul_grad_weight_bf16_whole_32x32",
            Kind::F16 => "matmul_grad_weight_f16_whole_32x32",
            Kind::Tf32 => "matmul_grad_weight_tf32_whole_32x32",
        },
        grid: [number(blocks), 1, 1],
        block: [number(32 * work.pieces), 1, 1],
        shared_bytes: number(shared),
        args: Vec::new(),
    };
    (is_whole(work, sum, device) && fits).then(launch)
}

/// The weight gradient of sizes `work`, in f32.
pub(super) fn grad_weight(
    kind: Kind,
    work: &Work,
    (op, call): (&MatmulGradWeight, &PlacedCall),
    device: &DeviceShape,
) -> CallLaunches {
    if let Some(mut launch) = whole(kind, work, &op.sum, device) {
        launch.args = whole_args(op, call);
        return launch.into();
    }
    let tile = best_tile(work, device);
    let tiles = WeightTiles {
        tiles: work.tiles([tile.extent(); 2]),
        outputs: tile.extent() * tile.extent(),
    };
    let launch = |args| Entries::grad_weight(kind).launch(work, tile, args);
    tiles.launches(op, call, launch)
}

/// The launch of both gradients of a small layer: blocks of the weight's tiles, then of the input's.
pub(super) struct Paired {
    entry: &'static str,
    blocks: usize,
    pub weight_blocks: u32,
}

impl Paired {
    /// Warps of a block; one that has a tile of the weight takes up to two pieces a warp.
    const WARPS: usize = 4;
    /// Blocks that share a multiprocessor.
    const TOGETHER: usize = 2;

    /// Where all blocks run at the same time; `None` where they would not.
    pub fn of(
        kind: Kind,
        (weight, input): (&Work, &Work),
        sum: &TokenSum,
        device: &DeviceShape,
    ) -> Option<Paired> {
        let weight_blocks = weight.tiles([WHOLE_EXTENT; 2]);
        let most = Self::TOGETHER * device.multiprocessors as usize;
        let blocks = |tile: Tile| weight_blocks + input.tiles([tile.extent(); 2]);
        let mut tiles = [Tile::T32, Tile::T64].into_iter();
        let tile = tiles.find(|&tile| blocks(tile) <= most)?;
        let fits = whole_shared_bytes(Self::WARPS) <= shared_of_two(device);
        let possible = input.vectors && fits && is_whole(weight, sum, device);
        let entry = match (kind, tile) {
            (Kind::Bf16, Tile::T32) => "matmul_grads_bf16_32x32",
            (Kind::Bf16, _) => "matmul_grads_bf16_64x64",
            (Kind::F16, Tile::T32) => "matmul_grads_f16_32x32",
            (Kind::F16, _) => "matmul_grads_f16_64x64",
            (Kind::Tf32, Tile::T32) => "matmul_grads_tf32_32x32",
            (Kind::Tf32, _) => "matmul_grads_tf32_64x64",
        };
        possible.then(|| Paired {
            entry,
            blocks: blocks(tile),
            weight_blocks: number(weight_blocks),
        })
    }

    /// The launch with these arguments.
    pub fn launch(&self, args: Vec<Arg>) -> KernelLaunch {
        KernelLaunch {
            entry: self.entry,
            grid: [number(self.blocks), 1, 1],
            block: [number(32 * Self::WARPS), 1, 1],
            shared_bytes: number(whole_shared_bytes(Self::WARPS)),
            args,
        }
    }
}

#[cfg(test)]
#[path = "matmul_tensor_tests.rs"]
mod tests;
