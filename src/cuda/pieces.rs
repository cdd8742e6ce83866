//! Weight gradients in pieces: how many there are, and the launch of tiles that meet in the workspace.

use super::call::{Arg, CallLaunches, KernelLaunch};
use super::matmul::{one_launch, word};
use crate::layout::PlacedCall;
use crate::num::tree::TokenSum;
use crate::op::Store;
use crate::op::matmul::MatmulGradWeight;

/// Where the partial sums begin is a multiple of this many bytes of the workspace.
const PARTIALS_ALIGNMENT: usize = 256;

/// Pieces of a whole grain, and of all grains; one of each where there are no tokens, so that the
/// output is still written.
pub(super) fn pieces(sum: &TokenSum) -> [usize; 2] {
    let grain = sum.grain.clamp(1, sum.tokens.max(1));
    [grain.div_ceil(sum.piece.max(1)), sum.pieces().max(1)]
}

/// The tiles of a weight gradient, each of as many outputs.
pub(super) struct WeightTiles {
    pub tiles: usize,
    pub outputs: usize,
}

impl WeightTiles {
    /// The launch that `launch` makes of the arguments all kernels of weight gradients take.
    ///
    /// With more than one piece the workspace holds an arrival counter a tile, then the partial tiles.
    pub fn launches(
        &self,
        op: &MatmulGradWeight,
        call: &PlacedCall,
        launch: impl Fn(Vec<Arg>) -> KernelLaunch,
    ) -> CallLaunches {
        let [pieces_of_grain, pieces] = pieces(&op.sum);
        let counters = (self.tiles * size_of::<u32>()).next_multiple_of(PARTIALS_ALIGNMENT);
        // A single piece goes straight to its place; the arguments must still be addresses.
        let dweight = Arg::Region(call.writes[0]);
        let workspace = |offset| match pieces {
            1 => dweight,
            _ => Arg::Workspace { offset },
        };
        let args = vec![
            Arg::Region(call.reads[0]),
            Arg::Region(call.reads[1]),
            dweight,
            workspace(0),
            workspace(counters),
            word(op.n_in),
            word(op.n_out),
            word(op.sum.tokens),
            word(op.sum.grain.max(1)),
            word(op.sum.piece.max(1)),
            word(pieces_of_grain),
            word(pieces),
            Arg::U32(u32::from(op.store == Store::Add)),
        ];
        let mut launches = one_launch(launch(args));
        if pieces > 1 {
            let partials = self.tiles * pieces * self.outputs * size_of::<f32>();
            launches.zeroed_bytes = counters;
            launches.workspace_bytes = counters + partials;
        }
        launches
    }
}
