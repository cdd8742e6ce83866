//! Both gradients of a small linear layer in f32 by one launch: blocks of the input's tiles, then blocks of pieces of the
//! weight's tiles.
//!
//! Alone, each of the two leaves most of a multiprocessor's time to waiting. Blocks of 128 threads with small tiles stand
//! there together, as many as fit, so one waits while another multiplies.

use super::call::{Arg, CallLaunches, DeviceShape, KernelLaunch};
use super::matmul::{OwnWork, Tile};
use super::pieces::{WeightTiles, Work};
use super::rows::{number, regions};
use crate::layout::{PlacedCall, Region};
use crate::num::tree::TokenSum;
use crate::op::matmul::MatmulGradWeight;

/// Threads of a block, and blocks that share a multiprocessor.
const THREADS: u32 = 128;
const TOGETHER: usize = 4;

/// Dynamic shared memory: the most that the stages of one of the tiles need, five of 32 rows of 32 terms with a pad of 4
/// and of 32 terms of 32 columns.
const SHARED_BYTES: usize = 5 * (32 * 36 + 32 * 32) * size_of::<f32>();

/// The tiles that a side can have.
const SMALL: [Tile; 2] = [Tile::T64x32, Tile::T32x32];

/// One of the two products: its sizes, how many terms each of its chains has, and its tile.
#[derive(Clone, Copy)]
struct Side {
    work: Work,
    terms: usize,
    tile: Tile,
}

impl Side {
    fn blocks(&self) -> usize {
        self.work.tiles(self.tile.extents()) * self.work.pieces
    }

    /// Cycles of all its blocks one after another among others, and of one of them alone.
    fn cycles(&self) -> [usize; 2] {
        let among = self.blocks() * self.terms * self.tile.cycles();
        [among, self.terms * self.tile.cycles_alone()]
    }
}

/// The tiles with which both gradients are done first.
pub(super) struct Pair {
    input: Side,
    weight: Side,
}

impl Pair {
    /// `None` where one of the two would take larger tiles alone, or not all blocks run at the same time. The input's chains
    /// have a term an output of the layer, which are the rows of the weight.
    pub fn of(
        (weight, input): (&Work, &Work),
        sum: &TokenSum,
        device: &DeviceShape,
    ) -> Option<Self> {
        let is_small = |work: &Work, transposed| {
            let work = *work;
            SMALL.contains(&OwnWork { work, transposed }.tile(device))
        };
        let fits = SHARED_BYTES <= device.shared_bytes_per_block as usize;
        let vectors = weight.vectors && input.vectors;
        if !(fits && vectors && is_small(weight, 0) && is_small(input, 1)) {
            return None;
        }
        let multiprocessors = device.multiprocessors.max(1) as usize;
        let side = |work: &Work, terms, tile| Side {
            work: *work,
            terms,
            tile,
        };
        let pairs = SMALL.into_iter().flat_map(|of_input| {
            SMALL.map(|of_weight| Pair {
                input: side(input, weight.m, of_input),
                weight: side(weight, sum.piece.min(sum.grain), of_weight),
            })
        });
        let together = pairs.filter(|pair| {
            (1..=TOGETHER * multiprocessors).contains(&(pair.input.blocks() + pair.weight.blocks()))
        });
        together.min_by_key(|pair| pair.cycles(multiprocessors))
    }

    /// Cycles of the busiest of so many multiprocessors; of equals, those of both longest blocks.
    fn cycles(&self, multiprocessors: usize) -> [usize; 2] {
        let [[a, a_alone], [b, b_alone]] = [self.input.cycles(), self.weight.cycles()];
        let busiest = ((a + b) / multiprocessors).max(a_alone).max(b_alone);
        [busiest, a_alone + b_alone]
    }

    fn entry(&self) -> &'static str {
        match (self.input.tile, self.weight.tile) {
            (Tile::T64x32, Tile::T64x32) => "matmul_grads_f32_64x32_64x32",
            (Tile::T64x32, _) => "matmul_grads_f32_64x32_32x32",
            (_, Tile::T64x32) => "matmul_grads_f32_32x32_64x32",
            _ => "matmul_grads_f32_32x32_32x32",
        }
    }

    /// The launch: dy and x, the place of dweight, the numbers of its cut, then the weight and the place of dx.
    pub fn launches(
        &self,
        (op, call): (&MatmulGradWeight, &PlacedCall),
        of_input: [Region; 2],
    ) -> CallLaunches {
        let tiles = WeightTiles {
            tiles: self.weight.work.tiles(self.weight.tile.extents()),
            outputs: self.weight.tile.outputs(),
        };
        let input_blocks = self.input.blocks();
        tiles.launches(op, call, |mut args| {
            args.extend(regions(of_input));
            args.push(Arg::U32(number(input_blocks)));
            KernelLaunch {
                entry: self.entry(),
                grid: [number(input_blocks + self.weight.blocks()), 1, 1],
                block: [THREADS, 1, 1],
                shared_bytes: number(SHARED_BYTES),
                args,
            }
        })
    }
}
