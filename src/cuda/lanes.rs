//! What of a step's calls needs the order of the program, and what may run beside it in a graph.
//!
//! A large gradient of weights is needed by nothing before the end of the step, while the way back through the
//! layers goes on. It stands in a lane of its own: its blocks take the multiprocessors that the main lane's kernels
//! leave idle at their ends, and multiply while those wait for memory. Each lane keeps the program's order and has
//! its own workspace. A call waits for the other lane's calls before it in the program that touch what it writes, or
//! write what it touches. So each call finds in memory what it finds in the program's order, and no bit depends on which
//! lane is ahead.

use super::together::Group;
use crate::layout::{PlacedCall, Region};
use crate::op::Op;

/// Elements of its two factors from which a gradient of weights is worth a lane of its own: below, a crossing between lanes
/// costs about as much as the gradient itself.
const WORTH_ELEMENTS: usize = 1 << 22;

/// One of the two lanes of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    Main,
    Side,
}

impl Lane {
    /// Bytes of workspace that the library's algorithms may use in this lane. Weight gradients are as fast without much of it.
    pub fn library_bytes(self) -> usize {
        match self {
            Lane::Main => 32 << 20,
            Lane::Side => 4 << 20,
        }
    }
}

/// How many lanes there are.
pub const LANES: usize = 2;

/// Neighbouring calls that are issued together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// The first call.
    pub first: usize,
    pub calls: usize,
    pub lane: Lane,
    /// The units that must have ended before this one starts, one of a lane at most; what these wait for is left out.
    pub after: Vec<usize>,
}

/// The lane of a call that no group serves.
pub fn lane_of(op: &Op) -> Lane {
    let elements = match op {
        Op::MatmulGradWeight(op) => op.sum.tokens * (op.n_in + op.n_out),
        Op::LoraUpGradWeight(op) => op.sum.tokens * (op.adapters.rank + op.adapters.n_out),
        _ => 0,
    };
    match elements >= WORTH_ELEMENTS {
        true => Lane::Side,
        false => Lane::Main,
    }
}

/// The units of a program in its order, `groups` being the groups that begin at each call.
pub fn units(calls: &[PlacedCall], groups: &[Option<Group>]) -> Vec<Unit> {
    let mut units: Vec<Unit> = Vec::new();
    let mut first = 0;
    while let Some(call) = calls.get(first) {
        let group = groups.get(first).and_then(Option::as_ref);
        let lane = group.map_or_else(|| lane_of(&call.call.op), |_| Lane::Main);
        let count = group.map_or(1, |group| group.calls);
        let after = waits(calls, &units, (first, count), lane);
        units.push(Unit {
            first,
            calls: count,
            lane,
            after,
        });
        first += count;
    }
    units
}

/// What the unit of these calls waits for: the last unit of its own lane, and the last one of the other lane whose order
/// with it matters, unless its own lane has waited for that one or a later one.
fn waits(
    calls: &[PlacedCall],
    units: &[Unit],
    (first, count): (usize, usize),
    lane: Lane,
) -> Vec<usize> {
    let own = &calls[first..][..count];
    let before = units.iter().rposition(|unit| unit.lane == lane);
    let known = units.iter().filter(|unit| unit.lane == lane);
    let known = known.flat_map(|unit| &unit.after);
    let known = known.filter(|&&at| units[at].lane != lane).max();
    let behind = known.map_or(0, |at| at + 1);
    let other = (behind..units.len()).rev().find(|&at| {
        let unit = &units[at];
        let theirs = &calls[unit.first..][..unit.calls];
        unit.lane != lane && ordered(theirs, own)
    });
    before.into_iter().chain(other).collect()
}

/// Whether the order of two runs of calls matters: one writes what the other touches.
fn ordered(a: &[PlacedCall], b: &[PlacedCall]) -> bool {
    writes_into(a, b) || writes_into(b, a)
}

fn writes_into(a: &[PlacedCall], b: &[PlacedCall]) -> bool {
    let touched: Vec<&Region> = b
        .iter()
        .flat_map(|c| c.reads.iter().chain(&c.writes))
        .collect();
    let mut written = a.iter().flat_map(|call| &call.writes);
    written.any(|w| touched.iter().any(|t| w.overlaps(t)))
}
