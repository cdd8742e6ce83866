//! Where calls that stand again are put: dropped where nothing reads them, and else as late as their readers allow.
//!
//! Calls are moved in units. A unit is a call after those that fill scratch for it, such as the numbers of a weight that
//! is stored as NF4: nothing may come between them, for other units fill the same scratch.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::op::{OpCall, Slot};
use crate::program::SlotTable;
use crate::shape::Role;

/// A call after those that fill scratch for it.
pub type Unit = Vec<OpCall>;

/// The bounds of the units of a list of calls.
pub fn unit_bounds(slots: &SlotTable, calls: &[OpCall]) -> Vec<Range<usize>> {
    let fills = |call: &OpCall| {
        let roles = call.writes.iter().map(|&slot| slots.spec(slot).role);
        roles.into_iter().all(|role| role == Role::Scratch)
    };
    let (mut bounds, mut start) = (Vec::new(), 0);
    for (index, call) in calls.iter().enumerate() {
        if !fills(call) || index + 1 == calls.len() {
            bounds.push(start..index + 1);
            start = index + 1;
        }
    }
    bounds
}

/// A list of calls in units.
pub fn units(slots: &SlotTable, calls: &[OpCall]) -> Vec<Unit> {
    let bounds = unit_bounds(slots, calls).into_iter();
    bounds.map(|range| calls[range].to_vec()).collect()
}

/// The tensors that calls find: those that they read or update before they write them.
pub fn needs(slots: &SlotTable, calls: &[OpCall]) -> BTreeSet<Slot> {
    let (mut needs, mut written) = (BTreeSet::new(), BTreeSet::new());
    for call in calls {
        for slot in call.reads.iter().copied().chain(call.updated()) {
            let root = slots.root(slot).0;
            if !written.contains(&root) {
                needs.insert(root);
            }
        }
        written.extend(roots_written(slots, call));
    }
    needs
}

/// The tensors that calls write.
pub fn writes(slots: &SlotTable, calls: &[OpCall]) -> BTreeSet<Slot> {
    let all = calls.iter().flat_map(|call| roots_written(slots, call));
    all.collect()
}

fn roots_written<'a>(slots: &'a SlotTable, call: &'a OpCall) -> impl Iterator<Item = Slot> + 'a {
    call.writes.iter().map(|&slot| slots.root(slot).0)
}

/// The first and the last of some calls that write each tensor.
pub struct Written(BTreeMap<Slot, (usize, usize)>);

impl Written {
    /// Of these calls.
    pub fn by(slots: &SlotTable, calls: &[OpCall]) -> Self {
        let mut written = BTreeMap::new();
        for (index, call) in calls.iter().enumerate() {
            for root in roots_written(slots, call) {
                let (first, _) = *written.entry(root).or_insert((index, index));
                written.insert(root, (first, index));
            }
        }
        Written(written)
    }

    /// Whether a call outside of `range` writes the tensor.
    pub fn outside(&self, root: Slot, range: &Range<usize>) -> bool {
        let found = self.0.get(&root);
        found.is_some_and(|(first, last)| *first < range.start || *last >= range.end)
    }

    /// Whether a call from this one on writes the tensor.
    pub fn from(&self, root: Slot, index: usize) -> bool {
        self.0.get(&root).is_some_and(|(_, last)| *last >= index)
    }
}

/// The ones of `twins` that units find.
pub fn found_of(slots: &SlotTable, units: &[Unit], twins: &BTreeSet<Slot>) -> BTreeSet<Slot> {
    let found = units.iter().flat_map(|unit| needs(slots, unit));
    found.filter(|root| twins.contains(root)).collect()
}

/// The units of `again` without those that write none of `twins` which a later one finds or which is `read` after them.
pub fn read_ones(
    slots: &SlotTable,
    again: Vec<Unit>,
    (mut read, twins): (BTreeSet<Slot>, &BTreeSet<Slot>),
) -> Vec<Unit> {
    let mut kept = Vec::new();
    for unit in again.into_iter().rev() {
        if !writes(slots, &unit).is_disjoint(&read) {
            let more = needs(slots, &unit).into_iter();
            read.extend(more.filter(|root| twins.contains(root)));
            kept.push(unit);
        }
    }
    kept.reverse();
    kept
}

/// What keeps a unit in its place.
struct Ties {
    needs: BTreeSet<Slot>,
    writes: BTreeSet<Slot>,
}

impl Ties {
    /// Scratch that every unit fills before it reads it, `passing`, ties none to another.
    fn of(slots: &SlotTable, unit: &Unit, passing: &BTreeSet<Slot>) -> Self {
        let writes = writes(slots, unit).into_iter();
        Ties {
            needs: needs(slots, unit),
            writes: writes.filter(|root| !passing.contains(root)).collect(),
        }
    }

    /// Whether the order of the two matters.
    fn ordered(&self, other: &Ties) -> bool {
        !self.writes.is_disjoint(&other.needs)
            || !self.needs.is_disjoint(&other.writes)
            || !self.writes.is_disjoint(&other.writes)
    }
}

/// Puts every unit of `again` directly before the first one that has to come after it: what it writes then lives as
/// shortly as it can.
pub fn latest(slots: &SlotTable, again: Vec<Unit>, rest: Vec<Unit>) -> Vec<OpCall> {
    let all = || again.iter().chain(&rest);
    let found: BTreeSet<Slot> = all().flat_map(|unit| needs(slots, unit)).collect();
    let scratch = all().flat_map(|unit| writes(slots, unit));
    let passing: BTreeSet<Slot> = scratch
        .filter(|&root| slots.spec(root).role == Role::Scratch && !found.contains(&root))
        .collect();
    let tied = |unit: Unit| (Ties::of(slots, &unit, &passing), unit);
    let mut placed: Vec<(Ties, Unit)> = rest.into_iter().map(tied).collect();
    for unit in again.into_iter().rev() {
        let (ties, unit) = tied(unit);
        let place = placed.iter().position(|(other, _)| ties.ordered(other));
        placed.insert(place.unwrap_or(placed.len()), (ties, unit));
    }
    placed.into_iter().flat_map(|(_, unit)| unit).collect()
}
