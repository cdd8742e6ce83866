//! What a program computes, without computing it: every value is the hash of the call that writes it and of the values
//! that the call reads. Two programs whose results have the same hashes compute the same bits, at any size.

use std::collections::BTreeMap;
use std::ops::Range;

use bitstep::op::rms_norm::RmsNorm;
use bitstep::op::{Access, Op, OpCall, Slot};
use bitstep::plan::Plan;
use bitstep::program::SlotTable;
use blake3::{Hash, Hasher};

/// A part of a value: the value, its first element that stands here, and where it stands.
type Part = (Hash, usize, Range<usize>);

/// What the tensors of a plan hold, by their roots.
struct Values<'a> {
    slots: &'a SlotTable,
    held: BTreeMap<Slot, Vec<Part>>,
}

impl Values<'_> {
    fn read(&self, slot: Slot) -> Hash {
        let (root, range) = self.slots.root(slot);
        let mut hasher = Hasher::new();
        let mut at = range.start;
        for (value, offset, place) in self.held.get(&root).into_iter().flatten() {
            let (start, end) = (place.start.max(range.start), place.end.min(range.end));
            if start >= end {
                continue;
            }
            if (place, *offset) == (&range, 0) {
                return *value;
            }
            self.unwritten(&mut hasher, root, at..start);
            let first = offset + start - place.start;
            hasher.update(format!("{value} {first} {}", end - start).as_bytes());
            at = end;
        }
        self.unwritten(&mut hasher, root, at..range.end);
        hasher.finalize()
    }

    /// What survives a step holds what it held; anything else holds what nothing may read.
    fn unwritten(&self, hasher: &mut Hasher, root: Slot, range: Range<usize>) {
        let spec = self.slots.spec(root);
        let name = match spec.role.persistent() {
            true => spec.name.as_str(),
            false => "never written",
        };
        if !range.is_empty() {
            hasher.update(format!("{name} {range:?}").as_bytes());
        }
    }

    fn write(&mut self, slot: Slot, value: Hash) {
        let (root, range) = self.slots.root(slot);
        let parts = self.held.entry(root).or_default();
        let mut left: Vec<Part> = vec![(value, 0, range.clone())];
        for (old, offset, place) in parts.drain(..) {
            let before = place.start..place.end.min(range.start);
            let after = place.start.max(range.end)..place.end;
            for part in [before, after].into_iter().filter(|part| !part.is_empty()) {
                left.push((old, offset + part.start - place.start, part));
            }
        }
        left.sort_by_key(|(_, _, place)| place.start);
        *parts = left;
    }

    fn call(&mut self, call: &OpCall) {
        if let Op::RmsNorm(op) = &call.op {
            return self.norm(op, call);
        }
        let mut inputs = format!("{}", call.op);
        for &slot in &call.reads {
            inputs += &format!(" {}", self.read(slot));
        }
        let operands = call.op.rule().signature().writes;
        for (operand, &slot) in operands.iter().zip(&call.writes) {
            if operand.access == Access::Update {
                inputs += &format!(" {}", self.read(slot));
            }
        }
        for (index, &slot) in call.writes.iter().enumerate() {
            let value = blake3::hash(format!("{index} of {inputs}").as_bytes());
            self.write(slot, value);
        }
    }

    /// The norm of a sum is the norm of what holds the sum.
    fn norm(&mut self, op: &RmsNorm, call: &OpCall) {
        let (mut x, mut writes) = (self.read(call.reads[0]), &call.writes[..]);
        if op.residual {
            let delta = self.read(call.reads[1]);
            x = blake3::hash(format!("{x} + {delta} in {}", op.math).as_bytes());
            self.write(writes[0], x);
            writes = &writes[1..];
        }
        let weight = self.read(call.reads[call.reads.len() - 1]);
        for (name, &slot) in ["h", "rstd"].iter().zip(writes) {
            let text = format!("{name} of {x} by {weight}, {:e}, {}", op.eps, op.math);
            self.write(slot, blake3::hash(text.as_bytes()));
        }
    }
}

/// What everything that survives a step holds after these calls of a plan, in slot order, by name.
pub(super) fn results(plan: &Plan, calls: &[OpCall]) -> Vec<(String, Hash)> {
    let mut values = Values {
        slots: &plan.slots,
        held: BTreeMap::new(),
    };
    calls.iter().for_each(|call| values.call(call));
    let slots = plan.slots.iter();
    let own = slots.filter(|(_, def)| def.view.is_none() && def.spec.role.persistent());
    own.map(|(slot, def)| (def.spec.name.clone(), values.read(slot)))
        .collect()
}
