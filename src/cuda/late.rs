//! Sums over pieces that a graph folds late: many in one launch, where each of them alone would leave most of a device
//! idle and hold up the calls behind it.
//!
//! The gradient of a norm leaves rows of partial sums of its weight's gradient, which nothing needs before the end of
//! the step. In a graph each such call has a place of its own for them, behind what calls share of the workspace, and
//! one launch folds as many as there are places. It stands before the first call that touches one of the gradients, or
//! before the call for which there is no place left, or at the end. Before capture each call folds its own at once.

use std::collections::BTreeMap;

use super::call::{Arg, CallLaunches, DeviceShape, KernelLaunch};
use super::rms_norm::{ByPieces, FOLDS, SumSize};
use crate::layout::{ALIGNMENT, PlacedCall, Region};
use crate::op::Op;

/// What a graph issues besides, or instead of, its calls' own launches.
#[derive(Debug, Default, PartialEq)]
pub struct Late {
    /// For a call what leaves its partial sums, in place of its launches.
    instead: BTreeMap<usize, KernelLaunch>,
    /// Folds that stand before a call; those at the end before the one behind the last.
    folds: BTreeMap<usize, KernelLaunch>,
}

impl Late {
    /// The folds of a program whose partial sums have `room` in the arena.
    pub fn of(calls: &[PlacedCall], device: &DeviceShape, room: Region) -> Late {
        let mut late = Late::default();
        let mut waiting = Waiting::default();
        for (index, call) in calls.iter().enumerate() {
            if waiting.concerns(call) {
                late.fold(index, &mut waiting, room);
            }
            let Some(sum) = sum_of(call) else { continue };
            let places = (room.bytes / sum.size.bytes()).min(FOLDS);
            if places == 0 {
                continue;
            }
            if waiting.size != Some(sum.size) || waiting.gradients.len() >= places {
                late.fold(index, &mut waiting, room);
            }
            let bytes = sum.size.bytes();
            let offset = room.offset + waiting.gradients.len() * bytes;
            let place = Arg::Region(Region { offset, bytes });
            late.instead.insert(index, sum.pieces(place, device));
            waiting.size = Some(sum.size);
            waiting.gradients.push(sum.gradient);
        }
        late.fold(calls.len(), &mut waiting, room);
        late
    }

    /// Puts the fold of all that wait before call `index`.
    fn fold(&mut self, index: usize, waiting: &mut Waiting, room: Region) {
        let Waiting { size, gradients } = std::mem::take(waiting);
        if let (Some(size), false) = (size, gradients.is_empty()) {
            let fold = size.fold(Arg::Region(room), &gradients);
            self.folds.insert(index, fold);
        }
    }

    /// What serves a call in place of its own launches.
    pub fn instead(&self, call: usize) -> Option<&KernelLaunch> {
        self.instead.get(&call)
    }

    /// The folds that stand before a call below `end` and have not been given yet; those of the program's end stand before the
    /// call behind its last.
    pub fn due(&mut self, end: usize) -> CallLaunches {
        let later = self.folds.split_off(&end);
        let due = std::mem::replace(&mut self.folds, later);
        CallLaunches {
            launches: due.into_values().collect(),
            ..CallLaunches::default()
        }
    }
}

/// Gradients of one size whose partial sums lie in the room, in this order.
#[derive(Default)]
struct Waiting {
    size: Option<SumSize>,
    gradients: Vec<Region>,
}

impl Waiting {
    /// Whether a call reads or writes one of the gradients.
    fn concerns(&self, call: &PlacedCall) -> bool {
        let mut touched = call.reads.iter().chain(&call.writes);
        touched.any(|region| self.gradients.iter().any(|g| g.overlaps(region)))
    }
}

fn sum_of(call: &PlacedCall) -> Option<ByPieces<'_>> {
    match &call.call.op {
        Op::RmsNormGrad(op) => ByPieces::of(op, call),
        _ => None,
    }
}

/// Bytes for the partial sums that calls can have waiting at once in a graph.
pub fn room_bytes(calls: &[PlacedCall]) -> usize {
    let sizes = calls.iter().filter_map(sum_of).map(|sum| sum.size.bytes());
    let most = sizes.clone().max().unwrap_or(0);
    most * sizes.count().min(FOLDS)
}

/// What calls share of a workspace, up to where partial sums that wait may begin.
pub fn shared_bytes(partials: usize) -> usize {
    partials.next_multiple_of(ALIGNMENT)
}

/// What of a lane's partials lies behind the bytes that a program's calls share.
pub fn room_behind(partials: Region, shared: usize) -> Region {
    let shared = shared_bytes(shared).min(partials.bytes);
    Region {
        offset: partials.offset + shared,
        bytes: partials.bytes - shared,
    }
}

/// Whether the sums of a call may be folded late.
pub fn is_late(call: &PlacedCall) -> bool {
    sum_of(call).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::call::H200;
    use crate::num::tree::TokenSum;
    use crate::op::clip::GradSquares;
    use crate::op::rms_norm::RmsNormGrad;
    use crate::op::{OpCall, Store};
    use crate::shape::Math;

    /// Where gradients of weights begin, and bytes of one.
    const GRADIENTS: usize = 1 << 30;
    const GRADIENT_BYTES: usize = 4 * 768;
    /// 256 rows of partial sums.
    const BYTES: usize = 256 * GRADIENT_BYTES;

    fn region(offset: usize, bytes: usize) -> Region {
        Region { offset, bytes }
    }

    fn placed(op: impl Into<Op>, reads: Vec<Region>, writes: Vec<Region>) -> PlacedCall {
        PlacedCall {
            reads,
            writes,
            call: OpCall {
                op: op.into(),
                reads: Vec::new(),
                writes: Vec::new(),
            },
        }
    }

    /// The gradient of norm `number` over so many tokens.
    fn norm(number: usize, tokens: usize) -> PlacedCall {
        let op = RmsNormGrad {
            d_model: 768,
            sum: TokenSum {
                tokens,
                grain: tokens,
                piece: 32,
            },
            store: Store::Add,
            weight_grad: true,
            delta_grad: false,
            math: Math::F32,
        };
        let gradient = region(GRADIENTS + number * GRADIENT_BYTES, GRADIENT_BYTES);
        let writes = vec![region(0, 1 << 25), gradient];
        placed(op, vec![region(1 << 25, 1 << 25); 4], writes)
    }

    /// The squares of the gradients from norm `first` on.
    fn squares(first: usize, count: usize) -> PlacedCall {
        let op = GradSquares {
            elements: count * 768,
        };
        let read = region(GRADIENTS + first * GRADIENT_BYTES, count * GRADIENT_BYTES);
        placed(op, vec![read], vec![region(1 << 29, 64)])
    }

    fn room(places: usize) -> Region {
        region(1 << 28, places * BYTES)
    }

    /// For each fold before which call it stands and how many gradients it serves.
    fn folds(calls: &[PlacedCall], places: usize) -> Vec<(usize, u32)> {
        let late = Late::of(calls, &H200, room(places));
        let folds = late.folds.iter();
        folds.map(|(&call, fold)| (call, fold.grid[1])).collect()
    }

    #[test]
    fn one_fold_serves_all_norms_before_the_first_call_that_reads_one() {
        let mut calls: Vec<_> = (0..5).map(|number| norm(number, 8192)).collect();
        calls.extend([squares(7, 2), squares(3, 3)]);
        assert_eq!(folds(&calls, 16), [(6, 5)]);
        // Nothing reads them: at the end.
        assert_eq!(folds(&calls[..5], 16), [(5, 5)]);
    }

    #[test]
    fn a_fold_stands_where_places_or_sizes_or_the_gradient_end() {
        let mut calls: Vec<_> = (0..20).map(|number| norm(number, 8192)).collect();
        assert_eq!(folds(&calls, 16), [(16, 16), (20, 4)]);
        assert_eq!(folds(&calls, 40), [(16, 16), (20, 4)]);
        assert_eq!(folds(&calls, 3).len(), 7);
        // Without a place each call folds its own.
        assert_eq!(folds(&calls, 0), []);
        calls.truncate(2);
        calls.extend([norm(2, 4096), norm(2, 4096), norm(3, 4096)]);
        assert_eq!(folds(&calls, 16), [(2, 2), (3, 1), (5, 2)]);
    }

    #[test]
    fn partial_sums_that_wait_lie_beside_each_other_in_the_order_of_the_fold() {
        let calls: Vec<_> = (0..3).map(|number| norm(number, 8192)).collect();
        let mut late = Late::of(&calls, &H200, room(16));
        for (call, placed) in calls.iter().enumerate() {
            let pieces = late.instead(call).expect("folded late");
            let place = region(room(16).offset + call * BYTES, BYTES);
            assert_eq!(pieces.args.last(), Some(&Arg::Region(place)));
            let own = ByPieces::of(&RmsNormGrad::clone(norm_of(placed)), placed).map(|s| s.size);
            assert_eq!(own.map(SumSize::bytes), Some(BYTES));
        }
        assert_eq!(late.due(3), CallLaunches::default());
        let due = late.due(4).launches;
        let gradients: Vec<Arg> = calls.iter().map(|c| Arg::Region(c.writes[1])).collect();
        assert_eq!(due.len(), 1);
        assert_eq!(due[0].args[3..6], gradients[..]);
        assert_eq!(late.due(4), CallLaunches::default());
    }

    fn norm_of(call: &PlacedCall) -> &RmsNormGrad {
        match &call.call.op {
            Op::RmsNormGrad(op) => op,
            other => panic!("not a norm's gradient: {other:?}"),
        }
    }

    #[test]
    fn the_room_is_what_lies_behind_and_is_counted() {
        let calls: Vec<_> = (0..20).map(|number| norm(number, 8192)).collect();
        assert_eq!(room_bytes(&calls), 16 * BYTES);
        assert_eq!(room_bytes(&calls[..2]), 2 * BYTES);
        assert_eq!(room_bytes(&[squares(0, 1)]), 0);
        assert_eq!(
            room_behind(region(4096, 1000), 300),
            region(4096 + 512, 488)
        );
        assert_eq!(room_behind(region(4096, 100), 300), region(4096 + 100, 0));
    }
}
