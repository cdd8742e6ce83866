//! What products of every precision share: their sizes, how long tiles keep a device busy, and weight
//! gradients in pieces that meet in the workspace.

use super::call::{Arg, CallLaunches, DeviceShape, KernelLaunch};
use super::rows::{numbers, regions};
use crate::layout::{PlacedCall, Region};
use crate::num::tree::TokenSum;
use crate::op::Store;
use crate::op::matmul::MatmulGradWeight;

/// Where the partial sums begin is a multiple of this many bytes of the workspace.
const PARTIALS_ALIGNMENT: usize = 256;

/// The sizes of a product `C[m, n]` in `pieces` pieces, and whether both operands may be read by 16 bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    pub m: usize,
    pub n: usize,
    pub pieces: usize,
    pub vectors: bool,
}

impl Work {
    /// Tiles of so many rows and columns.
    pub fn tiles(&self, [rows, columns]: [usize; 2]) -> usize {
        self.m.div_ceil(rows) * self.n.div_ceil(columns)
    }

    /// Cycles of the busiest multiprocessor, which needs so many for a tile that is alone there, or for one
    /// among others.
    pub fn cycles(
        &self,
        extents: [usize; 2],
        [alone, among]: [usize; 2],
        device: &DeviceShape,
    ) -> usize {
        let multiprocessors = device.multiprocessors.max(1) as usize;
        match (self.tiles(extents) * self.pieces).div_ceil(multiprocessors) {
            0 | 1 => alone,
            blocks => blocks * among,
        }
    }
}

/// Pieces of a whole grain, and of all grains; one of each where there are no tokens, so that the
/// output is still written.
pub(super) fn pieces(sum: &TokenSum) -> [usize; 2] {
    let grain = sum.grain.clamp(1, sum.tokens.max(1));
    [grain.div_ceil(sum.piece.max(1)), sum.pieces().max(1)]
}

/// Tokens of the sum, of a grain and of a piece, as kernels take them.
pub(super) fn cut_of(sum: &TokenSum) -> [usize; 3] {
    [sum.tokens, sum.grain.max(1), sum.piece.max(1)]
}

/// Whether the trees over the pieces of a grain and over the grains are one tree over all pieces.
pub(super) fn is_one_tree(sum: &TokenSum) -> bool {
    let [pieces_of_grain, pieces] = pieces(sum);
    pieces <= pieces_of_grain || pieces_of_grain.is_power_of_two()
}

/// The arguments of a kernel whose blocks compute all pieces of a tile.
pub(super) fn whole_args(op: &MatmulGradWeight, call: &PlacedCall) -> Vec<Arg> {
    let mut args = regions([call.reads[0], call.reads[1], call.writes[0]]).to_vec();
    args.extend(cut_numbers(op));
    args
}

/// The tiles of a weight gradient, each of as many outputs. With more than one piece the workspace holds an
/// arrival counter a tile, then the partial tiles.
pub(super) struct WeightTiles {
    pub tiles: usize,
    pub outputs: usize,
}

impl WeightTiles {
    fn counters(&self) -> usize {
        (self.tiles * size_of::<u32>()).next_multiple_of(PARTIALS_ALIGNMENT)
    }

    /// Where the output goes, and the addresses of counters and partials.
    pub fn places(&self, output: Region, sum: &TokenSum) -> [Arg; 3] {
        let [_, pieces] = pieces(sum);
        let output = Arg::Region(output);
        // A single piece goes straight to its place; the arguments must still be addresses.
        let workspace = |offset| match pieces {
            1 => output,
            _ => Arg::Workspace { offset },
        };
        [output, workspace(0), workspace(self.counters())]
    }

    /// The launches with the workspace in which the pieces meet.
    pub fn with_workspace(&self, mut launches: CallLaunches, sum: &TokenSum) -> CallLaunches {
        let [_, pieces] = pieces(sum);
        if pieces > 1 {
            let partials = self.tiles * pieces * self.outputs * size_of::<f32>();
            launches.zeroed_bytes = self.counters();
            launches.workspace_bytes = self.counters() + partials;
        }
        launches
    }

    /// The launch that `launch` makes of the arguments all kernels of weight gradients take.
    pub fn launches(
        &self,
        op: &MatmulGradWeight,
        call: &PlacedCall,
        launch: impl Fn(Vec<Arg>) -> KernelLaunch,
    ) -> CallLaunches {
        let mut args = regions([call.reads[0], call.reads[1]]).to_vec();
        args.extend(self.places(call.writes[0], &op.sum));
        args.extend(cut_numbers(op));
        self.with_workspace(launch(args).into(), &op.sum)
    }
}

/// The sizes of a weight gradient and of its cut, as all its kernels take them.
fn cut_numbers(op: &MatmulGradWeight) -> [Arg; 8] {
    let [pieces_of_grain, pieces] = pieces(&op.sum);
    let [tokens, grain, piece] = cut_of(&op.sum);
    numbers([
        op.n_in,
        op.n_out,
        tokens,
        grain,
        piece,
        pieces_of_grain,
        pieces,
        usize::from(op.store == Store::Add),
    ])
}
