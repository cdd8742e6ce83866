//! What of a step's calls needs the order of the program, and what may run beside it in a graph.
//!
//! A large gradient of weights is needed by nothing before the end of the step, while the way back through the
//! layers goes on. It stands in a lane of its own: its blocks take the multiprocessors that the main lane's kernels
//! leave idle at their ends, and multiply while those wait for memory. Each lane keeps the program's order and has
//! its own workspace. A call waits for the other lane's calls before it in the program that touch what it writes, or
//! write what it touches. So each call finds in memory what it finds in the program's order, and no bit depends on which
//! lane is ahead.

use super::together::{Group, overlap};
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

/// The units of a program, each lane's in its order, `groups` being the groups that begin at each call.
///
/// A gradient of weights stands beside the gradient of the same layer's input: two products, which would only share what one of them
/// could use alone. So it starts behind its neighbour of the main lane, where their order does not matter, and beside what follows, which
/// more often waits for memory.
pub fn units(calls: &[PlacedCall], groups: &[Option<Group>]) -> Vec<Unit> {
    let mut made = Units {
        calls,
        units: Vec::new(),
    };
    let mut held: Vec<usize> = Vec::new();
    let mut first = 0;
    while let Some(call) = calls.get(first) {
        let group = groups.get(first).and_then(Option::as_ref);
        let count = group.map_or(1, |group| group.calls);
        if group.is_none() && lane_of(&call.call.op) == Lane::Side {
            held.push(first);
        } else {
            let run = &calls[first..][..count];
            let waits = |&side: &usize| ordered(&calls[side..][..1], run);
            let behind = !held.iter().any(waits);
            let sides = std::mem::take(&mut held);
            let (before, after) = if behind {
                (vec![], sides)
            } else {
                (sides, vec![])
            };
            before
                .into_iter()
                .for_each(|side| made.push((side, 1), Lane::Side, None));
            made.push((first, count), Lane::Main, None);
            let main = made.units.len() - 1;
            after
                .into_iter()
                .for_each(|side| made.push((side, 1), Lane::Side, Some(main)));
        }
        first += count;
    }
    held.into_iter()
        .for_each(|side| made.push((side, 1), Lane::Side, None));
    made.units
}

struct Units<'c> {
    calls: &'c [PlacedCall],
    units: Vec<Unit>,
}

impl Units<'_> {
    /// Adds a unit that starts behind `main`, where there is one, and behind the last unit of its own lane and the last one of the
    /// other lane whose order with it matters, unless its own lane has waited for that one or a later one.
    fn push(&mut self, (first, calls): (usize, usize), lane: Lane, main: Option<usize>) {
        let own = &self.calls[first..][..calls];
        let units = &self.units;
        let before = units.iter().rposition(|unit| unit.lane == lane);
        let waits = units.iter().filter(|unit| unit.lane == lane);
        let waits = waits.flat_map(|unit| &unit.after);
        let known = waits.filter(|&&at| units[at].lane != lane).max();
        let unknown = known.map_or(0, |at| at + 1)..units.len();
        let other = main.or_else(|| {
            unknown.rev().find(|&at| {
                let unit = &units[at];
                unit.lane != lane && ordered(&self.calls[unit.first..][..unit.calls], own)
            })
        });
        let after = before.into_iter().chain(other).collect();
        self.units.push(Unit {
            first,
            calls,
            lane,
            after,
        });
    }
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
    written.any(|w| touched.iter().any(|t| overlap(w, t)))
}
