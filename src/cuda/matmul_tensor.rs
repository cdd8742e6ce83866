//! Linear layers of the tensor-core domains on the GPU: which kernel of `ptx/matmul*_{bf16,f16,tf32}.cu`
//! computes a product, and on what grid.
//!
//! A kernel computes whole chains of steps, so the choice of a tile changes no bit.

use super::call::{Arg, CallLaunches, DeviceShape, KernelLaunch};
use super::pieces::{WeightTiles, Work};
use super::rows::number;
use crate::layout::PlacedCall;
use crate::num::tensor_step::Kind;
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

/// The weight gradient of sizes `work`, in f32.
pub(super) fn grad_weight(
    kind: Kind,
    work: &Work,
    (op, call): (&MatmulGradWeight, &PlacedCall),
    device: &DeviceShape,
) -> CallLaunches {
    let tile = best_tile(work, device);
    let tiles = WeightTiles {
        tiles: work.tiles([tile.extent(); 2]),
        outputs: tile.extent() * tile.extent(),
    };
    let launch = |args| Entries::grad_weight(kind).launch(work, tile, args);
    tiles.launches(op, call, launch)
}

#[cfg(test)]
#[path = "matmul_tensor_tests.rs"]
mod tests;
