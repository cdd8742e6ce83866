//! Linear layers of the tensor-core domains on the GPU: which kernel of `ptx/matmul*_{bf16,f16,tf32}.cu`
//! computes a product, and on what grid.
//!
//! A kernel computes whole chains of steps, so the choice of a tile changes no bit.

use super::call::{Arg, CallLaunches, DeviceShape, KernelLaunch};
use super::matmul::{one_launch, word};
use super::pieces::{WeightTiles, pieces};
use crate::layout::{PlacedCall, Region};
use crate::num::tensor_step::Kind;
use crate::op::matmul::{Matmul, MatmulGradInput, MatmulGradWeight};
use crate::shape::Math;

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

/// The sizes of a product `C[m, n]` in `pieces` pieces, and whether both operands may be read by 16 bytes.
#[derive(Clone, Copy, Debug)]
struct Work {
    m: usize,
    n: usize,
    pieces: usize,
    vectors: bool,
}

impl Work {
    fn tiles(&self, tile: Tile) -> usize {
        self.m.div_ceil(tile.extent()) * self.n.div_ceil(tile.extent())
    }

    /// The tile with which the busiest multiprocessor is done first; the larger of two equals.
    fn tile(&self, device: &DeviceShape) -> Tile {
        let multiprocessors = device.multiprocessors.max(1) as usize;
        let cycles = |tile: &Tile| {
            let blocks = (self.tiles(*tile) * self.pieces).div_ceil(multiprocessors);
            match blocks {
                0 | 1 => tile.cycles_alone(),
                _ => blocks * tile.cycles(),
            }
        };
        // Operands that no 16-byte access reaches are rare: they have kernels at both ends alone.
        let tiles = Tile::ALL
            .into_iter()
            .filter(|tile| self.vectors || *tile != Tile::T64)
            .filter(|tile| tile.shared_bytes() <= device.shared_bytes_per_block as usize);
        tiles.min_by_key(cycles).unwrap_or(Tile::T32)
    }
}

/// The kernels of one op and kind: by tile for operands aligned to 16 bytes, and for any others.
struct Entries {
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
    fn forward(kind: Kind) -> Entries {
        match kind {
            Kind::Bf16 => entries!("matmul_bf16"),
            Kind::F16 => entries!("matmul_f16"),
            Kind::Tf32 => entries!("matmul_tf32"),
        }
    }

    fn grad_input(kind: Kind) -> Entries {
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

    fn launch(&self, work: &Work, tile: Tile, args: Vec<Arg>) -> KernelLaunch {
        let blocks = work.tiles(tile) * work.pieces;
        KernelLaunch {
            entry: self.get(tile, work.vectors),
            grid: [u32::try_from(blocks).unwrap_or(u32::MAX), 1, 1],
            block: [tile.threads(), 1, 1],
            shared_bytes: u32::try_from(tile.shared_bytes()).unwrap_or(u32::MAX),
            args,
        }
    }
}

/// The kind of tensor-core step; `None` for chains of fused multiply-adds.
pub(super) fn kind_of(math: Math) -> Option<Kind> {
    match math {
        Math::F32 => None,
        Math::Tf32 => Some(Kind::Tf32),
        Math::Bf16 => Some(Kind::Bf16),
        Math::F16 => Some(Kind::F16),
    }
}

/// Whether rows of `contiguous` factors from a region on start at multiples of 16 bytes.
fn by_vectors(math: Math, region: Region, contiguous: usize) -> bool {
    let row_bytes = contiguous * math.storage().size();
    region.offset.is_multiple_of(16) && row_bytes.is_multiple_of(16)
}

/// `y = x · weightᵀ (+ bias)`; reads x, weight, bias, writes y.
pub(super) fn forward(
    op: &Matmul,
    kind: Kind,
    (call, device): (&PlacedCall, &DeviceShape),
) -> CallLaunches {
    let (x, weight, y) = (call.reads[0], call.reads[1], call.writes[0]);
    let work = Work {
        m: op.rows,
        n: op.n_out,
        pieces: 1,
        vectors: by_vectors(op.math, x, op.n_in) && by_vectors(op.math, weight, op.n_in),
    };
    if op.rows == 0 || op.n_out == 0 {
        return CallLaunches::default();
    }
    // Without a bias the kernel reads none; the argument must still be an address.
    let bias = call.reads.get(2).copied().filter(|_| op.bias);
    let args = vec![
        Arg::Region(x),
        Arg::Region(weight),
        Arg::Region(bias.unwrap_or(y)),
        Arg::Region(y),
        word(op.rows),
        word(op.n_in),
        word(op.n_out),
        Arg::U32(u32::from(bias.is_some())),
    ];
    one_launch(Entries::forward(kind).launch(&work, work.tile(device), args))
}

/// `dx = dy · weight`; reads dy, weight, writes dx.
pub(super) fn grad_input(
    op: &MatmulGradInput,
    kind: Kind,
    (call, device): (&PlacedCall, &DeviceShape),
) -> CallLaunches {
    let (dy, weight) = (call.reads[0], call.reads[1]);
    let work = Work {
        m: op.rows,
        n: op.n_in,
        pieces: 1,
        vectors: by_vectors(op.math, dy, op.n_out) && by_vectors(op.math, weight, op.n_in),
    };
    if op.rows == 0 || op.n_in == 0 {
        return CallLaunches::default();
    }
    let args = vec![
        Arg::Region(dy),
        Arg::Region(weight),
        Arg::Region(call.writes[0]),
        word(op.rows),
        word(op.n_in),
        word(op.n_out),
    ];
    one_launch(Entries::grad_input(kind).launch(&work, work.tile(device), args))
}

/// `dweight (+)= dyᵀ · x` in f32, cut into pieces and grains; reads dy, x, writes dweight.
pub(super) fn grad_weight(
    op: &MatmulGradWeight,
    kind: Kind,
    (call, device): (&PlacedCall, &DeviceShape),
) -> CallLaunches {
    let (dy, x) = (call.reads[0], call.reads[1]);
    if op.n_out == 0 || op.n_in == 0 {
        return CallLaunches::default();
    }
    let mut work = Work {
        m: op.n_out,
        n: op.n_in,
        pieces: 1,
        vectors: by_vectors(op.math, dy, op.n_out) && by_vectors(op.math, x, op.n_in),
    };
    work.pieces = pieces(&op.sum)[1];
    let tile = work.tile(device);
    let tiles = WeightTiles {
        tiles: work.tiles(tile),
        outputs: tile.extent() * tile.extent(),
    };
    let launch = |args| Entries::grad_weight(kind).launch(&work, tile, args);
    tiles.launches(op, call, launch)
}

#[cfg(test)]
#[path = "matmul_tensor_tests.rs"]
mod tests;
