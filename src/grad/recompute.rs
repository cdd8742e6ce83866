//! Recomputation: layers that keep only what goes into them, whose activations backward computes anew.
//!
//! It is a transformation of the program. Before the backward of a stretch of layers its forward calls stand again,
//! writing tensors of their own; backward reads those. The same calls over the same operands give the same bits, so
//! gradients do not change. What backward does not read is not computed again.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::GradBuilder;
use crate::error::PlanError;
use crate::op::{Access, OpCall, Slot};
use crate::program::SlotTable;
use crate::shape::{Role, TensorSpec};

/// The tensors of a stretch that stand a second time, by the first.
#[derive(Default)]
struct Twins {
    /// Roots that have a twin.
    roots: BTreeSet<Slot>,
    slots: BTreeMap<Slot, Slot>,
}

impl Twins {
    /// The activations that `stretch` writes and no call of the others does. What several stretches write in parts is
    /// written again in place, which gives the same bits; scratch is filled anew before each of its readers.
    fn of(slots: &SlotTable, stretch: &[OpCall], others: &[&[OpCall]]) -> Self {
        let roots = |calls: &[OpCall]| -> BTreeSet<Slot> {
            let written = calls.iter().flat_map(|call| &call.writes);
            written.map(|&slot| slots.root(slot).0).collect()
        };
        let elsewhere: BTreeSet<Slot> = others.iter().flat_map(|calls| roots(calls)).collect();
        let own = roots(stretch).into_iter();
        Twins {
            roots: own
                .filter(|root| !elsewhere.contains(root))
                .filter(|&root| slots.spec(root).role == Role::Activation)
                .collect(),
            slots: BTreeMap::new(),
        }
    }

    /// The twin of a slot, or the slot itself where its place has none.
    fn get(&mut self, slots: &mut SlotTable, slot: Slot) -> Result<Slot, PlanError> {
        if let Some(&twin) = self.slots.get(&slot) {
            return Ok(twin);
        }
        let (root, range) = slots.root(slot);
        if !self.roots.contains(&root) {
            return Ok(slot);
        }
        let TensorSpec {
            name,
            shape,
            dtype,
            role,
        } = slots.spec(slot).clone();
        let name = format!("again.{name}");
        let twin = match root == slot {
            true => slots.add(TensorSpec::new(name, shape, dtype, role)),
            false => {
                let whole = self.get(slots, root)?;
                slots.view(whole, range.start, name, shape)?
            }
        };
        self.slots.insert(slot, twin);
        Ok(twin)
    }
}

impl GradBuilder<'_> {
    /// Emits the backward of `body`, last call first. The calls of each stretch are computed again before their
    /// backward.
    ///
    /// # Errors
    /// As [`GradBuilder::backward`].
    pub fn backward_recomputed(
        &mut self,
        body: &[OpCall],
        stretches: &[Range<usize>],
    ) -> Result<(), PlanError> {
        let mut end = body.len();
        for stretch in stretches.iter().rev() {
            self.backward(&body[stretch.end..end])?;
            self.backward_again(body, stretch.clone())?;
            end = stretch.start;
        }
        self.backward(&body[..end])
    }

    fn backward_again(&mut self, body: &[OpCall], stretch: Range<usize>) -> Result<(), PlanError> {
        let others = [&body[..stretch.start], &body[stretch.end..]];
        let calls = &body[stretch];
        let mut twins = Twins::of(&self.program.slots, calls, &others);
        let mut again = Vec::with_capacity(calls.len());
        for call in calls {
            let mut twin_of = |slots: &[Slot]| -> Result<Vec<Slot>, PlanError> {
                let table = &mut self.program.slots;
                slots.iter().map(|&s| twins.get(table, s)).collect()
            };
            again.push(OpCall {
                op: call.op.clone(),
                reads: twin_of(&call.reads)?,
                writes: twin_of(&call.writes)?,
            });
        }
        // What later calls have found of the gradients of these tensors is that of their twins.
        for (slot, gradient) in self.gradients.clone() {
            let twin = twins.get(&mut self.program.slots, slot)?;
            self.gradients.insert(twin, gradient);
        }
        let first = self.program.calls.len();
        let again = self.forward(|program| program.calls.extend(again));
        self.backward(&again)?;
        let own: BTreeSet<Slot> = twins.slots.values().copied().collect();
        self.drop_unread(first..first + again.len(), &own);
        Ok(())
    }

    /// Removes the calls of a range that write nothing which a later call reads. Backward reads the twins alone:
    /// what else the calls write, such as the scratch of packed weights, it finds or fills itself.
    fn drop_unread(&mut self, range: Range<usize>, twins: &BTreeSet<Slot>) {
        let slots = &self.program.slots;
        let used = |call: &OpCall| -> Vec<Slot> {
            let updated = call.op.rule().signature().writes.into_iter();
            let updated = updated.zip(&call.writes);
            let updated = updated.filter(|(operand, _)| operand.access == Access::Update);
            let all = call.reads.iter().chain(updated.map(|(_, slot)| slot));
            all.map(|&slot| slots.root(slot).0).collect()
        };
        let later = self.program.calls[range.end..].iter();
        let mut read: BTreeSet<Slot> = later.flat_map(used).filter(|s| twins.contains(s)).collect();
        let mut unread = BTreeSet::new();
        for index in range.rev() {
            let call = &self.program.calls[index];
            let wanted = call.writes.iter().any(|&s| read.contains(&slots.root(s).0));
            match wanted {
                true => read.extend(used(call)),
                false => {
                    unread.insert(index);
                }
            }
        }
        let mut index = 0;
        self.program.calls.retain(|_| {
            index += 1;
            !unread.contains(&(index - 1))
        });
    }
}
