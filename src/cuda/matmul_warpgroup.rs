//! Products in bf16 and f16 by warpgroups (`ptx/matmul_warpgroup.cuh`), alone and with the sums of adapters, which then find the
//! product in registers.
//!
//! These are added to the rounded product, as a call of their own would read it, so no bit depends on it.

use super::call::{Arg, BOX_COLUMNS, DeviceShape, KernelLaunch, Matrix};
use super::rows::{by_vectors, number, numbers};
use crate::layout::{PlacedCall, Region};
use crate::op::lora::{Adapters, LoraDownGradInput, LoraUp};
use crate::op::matmul::{Matmul, MatmulGradInput};
use crate::shape::Math;

/// Columns of a tile, the most first.
const TILES: [usize; 3] = [256, 192, 128];
/// Rows of a block and of its cluster, terms of a stage, and the fewest stages.
const BLOCK_ROWS: usize = 128;
const BLOCKS: usize = 2;
const STAGE_TERMS: usize = 64;
const LEAST_STAGES: usize = 3;
const THREADS: u32 = 384;
/// Bytes of a box's row; rows of a box on its way to memory.
const ROW_BYTES: usize = 128;
const WAY_ROWS: usize = 16;
/// Terms of a step.
const STEP_TERMS: usize = 16;
/// Parts of columns with adapters of their own, at most.
const MOST_PARTS: usize = 4;

/// The kernel of a stem for a tile of so many columns.
macro_rules! sized {
    ($math:expr, $tile:expr, $stem:literal, $after:literal) => {
        match ($math, $tile) {
            (Math::Bf16, 256) => Some(concat!($stem, "_bf16_sm90a", $after, "_256")),
            (Math::Bf16, 192) => Some(concat!($stem, "_bf16_sm90a", $after, "_192")),
            (Math::Bf16, 128) => Some(concat!($stem, "_bf16_sm90a", $after, "_128")),
            (Math::F16, 256) => Some(concat!($stem, "_f16_sm90a", $after, "_256")),
            (Math::F16, 192) => Some(concat!($stem, "_f16_sm90a", $after, "_192")),
            (Math::F16, 128) => Some(concat!($stem, "_f16_sm90a", $after, "_128")),
            _ => None,
        }
    };
}

/// Bytes of dynamic shared memory: stages of both factors, outputs on their way, two barriers a stage, and what lies before
/// the first multiple of 1024.
fn shared_bytes(tile: usize) -> usize {
    let stage = (BLOCK_ROWS + tile) * ROW_BYTES;
    let stages = 197 * 1024 / stage;
    let ways = 8 * 2 * WAY_ROWS * ROW_BYTES;
    stages * stage + ways + 2 * 8 * stages + 1024
}

/// A product whose factors are brought in boxes.
#[derive(Clone, Copy)]
pub(super) struct Product {
    math: Math,
    rows: usize,
    columns: usize,
    terms: usize,
    left: Region,
    right: Region,
    out: Region,
    /// Whether the right factor's rows are terms and not columns of the output.
    turned: bool,
}

/// How a product is cut.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cut {
    tile: usize,
    tiles: usize,
    blocks: usize,
}

impl Product {
    /// `y = x · weightᵀ`; none with a bias.
    pub fn forward(op: &Matmul, call: &PlacedCall) -> Option<Product> {
        let [left, right] = call.reads[..] else {
            return None;
        };
        Some(Product {
            math: op.math,
            rows: op.rows,
            columns: op.n_out,
            terms: op.n_in,
            left,
            right,
            out: call.writes[0],
            turned: false,
        })
    }

    /// `dx = dy · weight`.
    pub fn grad_input(op: &MatmulGradInput, call: &PlacedCall) -> Product {
        Product {
            math: op.math,
            rows: op.rows,
            columns: op.n_in,
            terms: op.n_out,
            left: call.reads[0],
            right: call.reads[1],
            out: call.writes[0],
            turned: true,
        }
    }

    /// Whether the copy engine reaches all operands, and there are whole blocks and stages.
    fn fits(&self, device: &DeviceShape) -> bool {
        let whole = self.rows.is_multiple_of(BLOCKS * BLOCK_ROWS)
            && self.terms.is_multiple_of(STAGE_TERMS)
            && self.terms >= LEAST_STAGES * STAGE_TERMS;
        let narrow = matches!(self.math, Math::Bf16 | Math::F16);
        device.warpgroups && whole && narrow && self.reached(&[self.left, self.right, self.out])
    }

    /// Whether these operands, whose rows have a multiple of 16 bytes, begin at one.
    fn reached(&self, operands: &[Region]) -> bool {
        by_vectors(self.columns, self.math, operands)
    }

    /// The cut into tiles of these columns that is done first, where each part of the columns is whole tiles and the device does
    /// not stay empty.
    fn cut(&self, parts: &[usize], device: &DeviceShape) -> Option<Cut> {
        if !self.fits(device) {
            return None;
        }
        let clusters = device.multiprocessors as usize / BLOCKS;
        let whole = |tile: &usize| {
            let fits = shared_bytes(*tile) <= device.shared_bytes_per_block as usize;
            fits && parts.iter().all(|part| part.is_multiple_of(*tile))
        };
        let count =
            |tile: usize| self.rows / (BLOCKS * BLOCK_ROWS) * (parts.iter().sum::<usize>() / tile);
        let cost = |tile: &usize| count(*tile).div_ceil(clusters) * tile;
        let tile = TILES.into_iter().filter(whole).min_by_key(cost)?;
        let tiles = count(tile);
        let full = 2 * tiles >= clusters;
        full.then(|| Cut {
            tile,
            tiles,
            blocks: BLOCKS * tiles.min(clusters),
        })
    }

    /// The launch of a cut, with the maps of the product's operands and these further ones, and its numbers and these.
    fn launch(
        &self,
        entry: &'static str,
        cut: Cut,
        maps: impl IntoIterator<Item = Arg>,
        more: impl IntoIterator<Item = Arg>,
    ) -> KernelLaunch {
        let mut args = vec![self.left_map(), self.right_map(cut.tile)];
        args.extend(maps);
        let row_pairs = self.rows / (BLOCKS * BLOCK_ROWS);
        args.extend(numbers([row_pairs, cut.tiles, self.terms / STAGE_TERMS]));
        args.extend(more);
        KernelLaunch {
            entry,
            grid: [number(cut.blocks), 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: number(shared_bytes(cut.tile)),
            args,
        }
    }

    fn left_map(&self) -> Arg {
        map(self.left, [self.rows, self.terms], BLOCK_ROWS)
    }

    fn right_map(&self, tile: usize) -> Arg {
        match self.turned {
            false => map(self.right, [self.columns, self.terms], tile / 2),
            true => map(self.right, [self.terms, self.columns], STAGE_TERMS / 2),
        }
    }

    fn out_map(&self) -> Arg {
        map(self.out, [self.rows, self.columns], WAY_ROWS)
    }

    /// The product alone.
    pub fn alone(&self, device: &DeviceShape) -> Option<KernelLaunch> {
        let cut = self.cut(&[self.columns], device)?;
        let entry = match self.turned {
            false => sized!(self.math, cut.tile, "matmul", ""),
            true => sized!(self.math, cut.tile, "matmul_grad_input", ""),
        }?;
        Some(self.launch(entry, cut, [self.out_map()], []))
    }

    /// And the sums of adapters that stand on all of its columns.
    pub fn with_lora_up(
        &self,
        (op, call): (&LoraUp, &PlacedCall),
        device: &DeviceShape,
    ) -> Option<KernelLaunch> {
        let adapters = &op.adapters;
        let (s, b) = (call.reads[0], call.reads[1]);
        let steps = self.steps(adapters.rank, adapters.ranks(), &[s, b])?;
        let ends = part_ends(adapters)?;
        let low = map(s, [self.rows, adapters.ranks()], BLOCK_ROWS);
        let factor = |tile: usize| map(b, [self.columns, adapters.rank], tile / 2);
        let more = numbers([steps]).into_iter();
        let more = more.chain([Arg::F32(adapters.scale)]);
        let parts: Vec<usize> = adapters.parts.iter().map(|part| part.columns).collect();
        let cut = self.cut(&parts, device)?;
        let entry = sized!(self.math, cut.tile, "matmul", "_lora_up")?;
        let maps = [self.out_map(), low, factor(cut.tile)];
        Some(self.launch(entry, cut, maps, more.chain(numbers(ends))))
    }

    /// Steps of chains of `terms` terms, where these are whole steps, all of a row's ranks fit in a box, and the operands are
    /// reached.
    fn steps(&self, terms: usize, ranks: usize, operands: &[Region]) -> Option<usize> {
        let whole = terms.is_multiple_of(STEP_TERMS) && terms > 0;
        let fits = ranks <= BOX_COLUMNS as usize && self.reached(operands);
        (whole && fits).then_some(terms / STEP_TERMS)
    }

    /// The gradient of the input, and the part of adapters in it, added.
    pub fn with_lora_down(
        &self,
        (op, call): (&LoraDownGradInput, &PlacedCall),
        device: &DeviceShape,
    ) -> Option<KernelLaunch> {
        let (ds, a) = (call.reads[0], call.reads[1]);
        let steps = self.steps(op.ranks, op.ranks, &[ds, a])?;
        let low = map(ds, [self.rows, op.ranks], BLOCK_ROWS);
        let factor = map(a, [op.ranks, self.columns], STAGE_TERMS / 2);
        let cut = self.cut(&[self.columns], device)?;
        let entry = sized!(self.math, cut.tile, "matmul_grad_input", "_lora_down")?;
        let maps = [self.out_map(), low, factor];
        Some(self.launch(entry, cut, maps, numbers([steps])))
    }
}

/// The columns before which the first parts end, where at most four parts make up all columns; the kernel counts how many of
/// them a column is not below.
fn part_ends(adapters: &Adapters) -> Option<[usize; MOST_PARTS - 1]> {
    let mut end = 0;
    let mut ends = [adapters.n_out; MOST_PARTS - 1];
    for (i, part) in adapters.parts.iter().enumerate() {
        if part.first != end || i == MOST_PARTS {
            return None;
        }
        end += part.columns;
        if let Some(place) = ends.get_mut(i) {
            *place = end;
        }
    }
    (end == adapters.n_out).then_some(ends)
}

/// A matrix of 16-bit elements that is brought or taken in boxes of so many rows and 64 columns.
fn map(region: Region, [rows, columns]: [usize; 2], box_rows: usize) -> Arg {
    Arg::Matrix(Matrix {
        region,
        rows: number(rows),
        columns: number(columns),
        box_rows: number(box_rows),
    })
}

#[cfg(test)]
#[path = "matmul_warpgroup_tests.rs"]
mod tests;
