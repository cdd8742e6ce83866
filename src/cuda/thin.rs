//! Products with few columns, the ranks of adapters, in bf16 and f16: the kernels of `ptx/thin_rows.cuh`, and those of
//! `ptx/thin_sum.cuh` for sums over tokens. All rows of operands and outputs are whole chunks of 16 bytes.
//!
//! Of a product the rows are dealt to blocks, which bring the terms of many steps ahead. Of a sum over tokens a warp has one piece of a tile, and the pieces of a block's warps are neighbours in the balanced tree: a block leaves
//! one sum for all of them. So few blocks meet at a tile, and the last of them folds what they left in one round of loads.

use super::call::{Arg, CallLaunches, KernelLaunch};
use super::pieces::{WeightTiles, cut_numbers, is_one_tree, pieces};
use super::rows::{number, regions};
use crate::layout::PlacedCall;
use crate::num::tensor_step::Kind;
use crate::num::tree::TokenSum;
use crate::op::matmul::MatmulGradWeight;
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
/// Rows of a block of a product, and terms of a stage.
const ROWS: usize = 32;
const STAGE_TERMS: usize = 128;
/// Stages of such a block, where the thin factor's terms lie side by side, and where its columns do, by the columns.
const STAGES_TERMS_INSIDE: usize = 7;
const STAGES_COLUMNS_INSIDE: [usize; 3] = [7, 5, 4];

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

    /// The launch of a lower product, `s = x · aᵀ`.
    pub fn down(&self, rows: usize, args: Vec<Arg>) -> KernelLaunch {
        let lines = ROWS + EXTENTS[self.extent];
        let stage = lines * line_bytes(STAGE_TERMS);
        let shared = STAGES_TERMS_INSIDE * stage;
        self.rows(entries!("lora_down_thin"), (rows, 1), shared, args)
    }

    /// The launch of the gradient of `s` of so many parts.
    pub fn up_grad_input(&self, rows: usize, parts: usize, args: Vec<Arg>) -> KernelLaunch {
        let wide = ROWS * line_bytes(STAGE_TERMS);
        let stage = wide + STAGE_TERMS * line_bytes(EXTENTS[self.extent]);
        let shared = STAGES_COLUMNS_INSIDE[self.extent] * stage;
        self.rows(
            entries!("lora_up_grad_input_thin"),
            (rows, parts),
            shared,
            args,
        )
    }

    fn rows(
        &self,
        entries: Entries,
        (rows, parts): (usize, usize),
        shared_bytes: usize,
        args: Vec<Arg>,
    ) -> KernelLaunch {
        KernelLaunch {
            entry: self.entry(entries),
            grid: [number(rows.div_ceil(ROWS) * self.reads * parts), 1, 1],
            block: [number(4 * EXTENTS[self.extent]), 1, 1],
            shared_bytes: number(shared_bytes),
            args,
        }
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

    /// The weight gradient of a layer with so few rows of weights, whose rows and operands are whole chunks of 16 bytes.
    pub fn grad_weight(&self, op: &MatmulGradWeight, call: &PlacedCall) -> CallLaunches {
        let (tiles, rest) = (self.tiles(op.n_in), self.rest());
        let meeting = self.meeting(tiles);
        let mut args = regions([call.reads[0], call.reads[1]]).to_vec();
        args.extend(meeting.places(call.writes[0], &rest));
        args.extend(cut_numbers(op));
        let launch = self.launch(entries!("matmul_grad_weight_thin"), tiles, args);
        meeting.with_workspace(launch.into(), &rest)
    }

    /// The same over so many tiles for the upper matrices of adapters.
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
