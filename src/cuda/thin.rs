//! Gradients of upper matrices of adapters, whose thin factor has few columns, in bf16 and f16: the kernels of
//! `ptx/thin_sum.cuh`. All rows of operands and outputs are whole chunks of 16 bytes.
//!
//! A warp has one piece of a tile, and the pieces of a block's warps are neighbours in the balanced tree: a block
//! leaves one sum for all of them. So few blocks meet at a tile, and the last of them folds what they left in one
//! round of loads.

use super::call::{Arg, KernelLaunch};
use super::pieces::{WeightTiles, is_one_tree, pieces};
use super::rows::number;
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

/// The kernels in bf16 and in f16, by the thin columns of a tile.
const ENTRIES: [[&str; 3]; 2] = [
    [
        "lora_up_grad_weight_thin_bf16_16",
        "lora_up_grad_weight_thin_bf16_32",
        "lora_up_grad_weight_thin_bf16_48",
    ],
    [
        "lora_up_grad_weight_thin_f16_16",
        "lora_up_grad_weight_thin_f16_32",
        "lora_up_grad_weight_thin_f16_48",
    ],
];

/// How a sum over tokens with a thin factor is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Thin {
    entry: &'static str,
    /// Thin columns of a tile.
    extent: usize,
    /// Tiles of thin columns beside each other, each of which reads the wide factor.
    reads: usize,
    /// Blocks that meet at a tile.
    groups: usize,
}

impl Thin {
    /// Where there are kernels for so many thin columns, and a block has a piece for each of its warps.
    pub fn of(math: Math, columns: usize, sum: &TokenSum) -> Option<Thin> {
        let entries = match math {
            Math::Bf16 => ENTRIES[0],
            Math::F16 => ENTRIES[1],
            Math::Tf32 | Math::F32 => return None,
        };
        let reads = columns.div_ceil(EXTENTS[EXTENTS.len() - 1]);
        let at = EXTENTS.iter().position(|e| reads * e >= columns)?;
        let [_, pieces] = pieces(sum);
        let fits = (1..=MOST_READS).contains(&reads) && pieces >= WARPS && is_one_tree(sum);
        fits.then_some(Thin {
            entry: entries[at],
            extent: EXTENTS[at],
            reads,
            groups: pieces.div_ceil(WARPS),
        })
    }

    /// Tiles of the outputs over so many wide columns.
    pub fn tiles(&self, wide: usize) -> usize {
        wide.div_ceil(WIDE) * self.reads
    }

    /// Where the blocks of so many tiles meet.
    pub fn meeting(&self, tiles: usize) -> WeightTiles {
        WeightTiles {
            tiles,
            outputs: WIDE * self.extent,
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

    /// The launch over so many tiles.
    pub fn launch(&self, tiles: usize, args: Vec<Arg>) -> KernelLaunch {
        let line = line_bytes(WIDE) + line_bytes(self.extent);
        KernelLaunch {
            entry: self.entry,
            grid: [number(tiles * self.groups), 1, 1],
            block: [number(32 * WARPS), 1, 1],
            shared_bytes: number(WARPS * STAGES * STAGE_TOKENS * line),
            args,
        }
    }
}

#[cfg(test)]
#[path = "thin_tests.rs"]
mod tests;
