//! Gradients of upper matrices of adapters, whose thin factor has few columns, in bf16 and f16: the kernels of
//! `ptx/thin_sum.cuh`. All rows of operands and outputs are whole chunks of 16 bytes.
//!
//! A warp has one piece of a tile, and the pieces of a block's warps are neighbours in the balanced tree: a block
//! leaves one sum for all of them. So few blocks meet at a tile, and the last of them folds what they left in one
//! round of loads.

use super::call::{Arg, KernelLaunch};
use super::pieces::{WeightTiles, is_one_tree, pieces};
use super::rows::number;
use crate::num::tensor_step::Kind;
use crate::num::tree::TokenSum;
use crate::shape::Math;

/// Columns of the wide factor in a tile.
const WIDE: usize = 64;
/// Thin factors that a tile can have.
const EXTENTS: [usize; 3] = [16, 32, 48];
/// Times that the wide factor is read at most.
const MOST_READS: usize = 2;
/// Bytes that keep lines of shared memory in different banks.
const PAD_BYTES: usize = 16;
/// Warps of a block of a sum, stages of each, and tokens of a stage.
const WARPS: usize = 4;
const STAGES: usize = 6;
const STAGE_TOKENS: usize = 16;
/// Bytes of a line of so many elements in shared memory.
const fn line_bytes(elements: usize) -> usize {
    elements * size_of::<u16>() + PAD_BYTES
}

/// The kernels of a stem for bf16 and f16, by the thin columns of a tile.
macro_rules! entries {
    ($stem:literal) => {
        [
            [
                concat!($stem, "_bf16_16"),
                concat!($stem, "_bf16_32"),
                concat!($stem, "_bf16_48"),
            ],
            [
                concat!($stem, "_f16_16"),
                concat!($stem, "_f16_32"),
                concat!($stem, "_f16_48"),
            ],
        ]
    };
}

type Entries = [[&'static str; 3]; 2];

/// How the thin columns are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Columns {
    kind: Kind,
    /// Which of the extents a tile has.
    extent: usize,
    /// Tiles beside each other, each of which reads the wide factor.
    reads: usize,
}

impl Columns {
    /// Where there are kernels for so many.
    pub fn of(math: Math, columns: usize) -> Option<Columns> {
        let kind = Kind::of(math).filter(|kind| *kind != Kind::Tf32)?;
        let reads = columns.div_ceil(EXTENTS[EXTENTS.len() - 1]);
        let extent = EXTENTS.iter().position(|e| reads * e >= columns)?;
        (1..=MOST_READS).contains(&reads).then_some(Columns {
            kind,
            extent,
            reads,
        })
    }

    fn entry(&self, entries: Entries) -> &'static str {
        entries[usize::from(self.kind == Kind::F16)][self.extent]
    }
}

/// How a sum over tokens with a thin factor is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Thin {
    columns: Columns,
    /// Blocks that meet at a tile.
    groups: usize,
}

impl Thin {
    /// Where there are kernels for so many thin columns, and a block has a piece for each of its warps.
    pub fn of(math: Math, columns: usize, sum: &TokenSum) -> Option<Thin> {
        let columns = Columns::of(math, columns)?;
        let [_, pieces] = pieces(sum);
        let groups = pieces.div_ceil(WARPS);
        (pieces >= WARPS && is_one_tree(sum)).then_some(Thin { columns, groups })
    }

    /// Tiles of the outputs over so many wide columns.
    pub fn tiles(&self, wide: usize) -> usize {
        wide.div_ceil(WIDE) * self.columns.reads
    }

    /// Where the blocks of so many tiles meet.
    pub fn meeting(&self, tiles: usize) -> WeightTiles {
        WeightTiles {
            tiles,
            outputs: WIDE * self.extent(),
        }
    }

    /// What is left of the sum when the blocks have done theirs: one term a block.
    pub fn rest(&self) -> TokenSum {
        TokenSum {
            tokens: self.groups,
            grain: self.groups,
            piece: 1,
        }
    }

    /// The launch over so many tiles for the upper matrices of adapters.
    pub fn up_grad_weight(&self, tiles: usize, args: Vec<Arg>) -> KernelLaunch {
        self.launch(entries!("lora_up_grad_weight_thin"), tiles, args)
    }

    fn launch(&self, entries: Entries, tiles: usize, args: Vec<Arg>) -> KernelLaunch {
        let line = line_bytes(WIDE) + line_bytes(self.extent());
        KernelLaunch {
            entry: self.columns.entry(entries),
            grid: [number(tiles * self.groups), 1, 1],
            block: [number(32 * WARPS), 1, 1],
            shared_bytes: number(WARPS * STAGES * STAGE_TOKENS * line),
            args,
        }
    }

    /// Thin columns of a tile.
    fn extent(&self) -> usize {
        EXTENTS[self.columns.extent]
    }
}

#[cfg(test)]
#[path = "thin_tests.rs"]
mod tests;
