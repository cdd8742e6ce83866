//! Recomputation: layers of which backward computes some activations anew.
//!
//! It is a transformation of the program. Before the backward of a stretch of layers some of its forward calls stand
//! again, writing tensors of their own, their twins; backward reads those. The same calls over the same operands give
//! the same bits, so gradients do not change. What backward does not read is not computed again.
//!
//! A tensor has a twin or is kept: either every call that writes it stands again, in forward's order, or none does. And a
//! call stands again only while all that it reads still holds what it held then.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::GradBuilder;
use super::schedule::{self, Unit, Written};
use crate::error::PlanError;
use crate::op::{Op, OpCall, Slot};
use crate::program::SlotTable;
use crate::shape::{Role, TensorSpec};

/// How a unit of a stretch stands before its backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Again {
    /// Not at all: what it wrote is kept.
    #[default]
    Kept,
    /// As it stands in forward.
    Called,
    /// As the call that writes its other outputs from one of them, which is kept: the norm of a sum, from the sum.
    FromOwnOutput,
}

/// Calls of the body whose backward is derived at once, and what of them stands again before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stretch {
    pub calls: Range<usize>,
    /// Of each unit of the calls.
    pub again: Vec<Again>,
}

impl Stretch {
    /// Everything that backward reads of these calls stands again.
    pub fn whole(slots: &SlotTable, body: &[OpCall], calls: Range<usize>) -> Self {
        let units = schedule::unit_bounds(slots, &body[calls.clone()]).len();
        Stretch {
            calls,
            again: vec![Again::Called; units],
        }
    }

    fn keeps_all(&self) -> bool {
        self.again.iter().all(|&again| again == Again::Kept)
    }
}

/// A unit that stands again.
#[derive(Clone, Debug, PartialEq)]
pub struct Repeated {
    /// The ops of its calls.
    pub ops: Vec<Op>,
    /// The first tensor that it writes.
    pub tensor: String,
    /// Bytes that backward reads of what it writes, and that are not kept for it.
    pub bytes: usize,
}

/// The units of a stretch as they stand again, and the tensors that have a twin.
struct Standing {
    units: Vec<Option<Unit>>,
    bounds: Vec<Range<usize>>,
    roots: BTreeSet<Slot>,
}

impl Standing {
    /// Twins are for the activations that the stretch writes and no call outside it does. What several stretches write
    /// in parts is written again in place, which gives the same bits; scratch is filled anew before each of its readers.
    ///
    /// # Errors
    /// [`PlanError::Again`] for a tensor of which only some of its calls stand again.
    fn of(
        slots: &SlotTable,
        (calls, stretch): (&[OpCall], &Stretch),
        written_by: &Written,
    ) -> Result<Self, PlanError> {
        let bounds = schedule::unit_bounds(slots, calls);
        let choices = stretch
            .again
            .iter()
            .copied()
            .chain(std::iter::repeat(Again::Kept));
        let units = bounds.iter().zip(choices);
        let units = units.map(|(unit, again)| again_of(slots, &calls[unit.clone()], again));
        let units = units.collect::<Result<Vec<_>, _>>()?;
        let written = units.iter().flatten();
        let written = written.flat_map(|unit| schedule::writes(slots, unit));
        let roots: BTreeSet<Slot> = written
            .filter(|&root| !written_by.outside(root, &stretch.calls))
            .filter(|&root| slots.spec(root).role == Role::Activation)
            .collect();
        let plan = Standing {
            units,
            bounds,
            roots,
        };
        plan.check(slots, calls)?;
        Ok(plan)
    }

    fn check(&self, slots: &SlotTable, calls: &[OpCall]) -> Result<(), PlanError> {
        for (bounds, unit) in self.bounds.iter().zip(&self.units) {
            let forward = &calls[bounds.clone()];
            let unit = unit.as_deref().unwrap_or_default();
            let again = schedule::writes(slots, unit);
            let mut left = schedule::writes(slots, forward);
            left.retain(|root| self.roots.contains(root) && !again.contains(root));
            if let Some(&root) = left.first() {
                return Err(refused(
                    slots,
                    forward,
                    root,
                    "every call that writes it again",
                ));
            }
            let mut updated = unit.iter().flat_map(OpCall::updated);
            let kept = |&slot: &Slot| !self.roots.contains(&slots.root(slot).0);
            if let Some(slot) = updated.find(kept) {
                return Err(refused(slots, forward, slot, "no update of what is kept"));
            }
        }
        Ok(())
    }
}

/// The calls of a unit as they stand again; `None` where they do not.
fn again_of(slots: &SlotTable, unit: &[OpCall], again: Again) -> Result<Option<Unit>, PlanError> {
    match (again, unit.last()) {
        (Again::Called, _) => Ok(Some(unit.to_vec())),
        (Again::FromOwnOutput, Some(call)) => match call.op.rule().again_from_output(call) {
            Some(call) => Ok(Some(vec![call])),
            None => {
                let tensor = call.writes.first().copied().unwrap_or(Slot(0));
                Err(refused(
                    slots,
                    unit,
                    tensor,
                    "an op whose outputs follow from one of them",
                ))
            }
        },
        _ => Ok(None),
    }
}

fn refused(slots: &SlotTable, unit: &[OpCall], tensor: Slot, expected: &'static str) -> PlanError {
    PlanError::Again {
        op: unit.last().map_or("nothing", |call| call.op.rule().stem()),
        tensor: slots.spec(tensor).name.clone(),
        expected,
    }
}

/// The twins of slots, by the first.
#[derive(Default)]
struct Twins {
    /// Roots that have a twin.
    roots: BTreeSet<Slot>,
    slots: BTreeMap<Slot, Slot>,
}

impl Twins {
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
        let name = format!("{TWIN}{name}");
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

    /// Calls over the twins of their operands.
    fn calls(&mut self, slots: &mut SlotTable, calls: &[OpCall]) -> Result<Unit, PlanError> {
        let mut twins = |operands: &[Slot]| -> Result<Vec<Slot>, PlanError> {
            operands.iter().map(|&s| self.get(slots, s)).collect()
        };
        let mut all = Vec::with_capacity(calls.len());
        for call in calls {
            all.push(OpCall {
                op: call.op.clone(),
                reads: twins(&call.reads)?,
                writes: twins(&call.writes)?,
            });
        }
        Ok(all)
    }
}

/// What the names of twins begin with.
const TWIN: &str = "again.";

/// A tensor's name without the number of its layer, which all layers share.
fn kind_of(name: &str) -> String {
    let name = name.strip_prefix(TWIN).unwrap_or(name);
    let mut parts: Vec<&str> = name.split('.').collect();
    let layers = parts.iter().position(|&part| part == "layers");
    if let Some(at) = layers
        && parts
            .get(at + 1)
            .is_some_and(|n| n.parse::<usize>().is_ok())
    {
        parts.drain(..at + 2);
    }
    parts.join(".")
}

impl GradBuilder<'_> {
    /// Emits the backward of `body`, last call first. What the stretches say stands again before their backward.
    ///
    /// # Errors
    /// [`PlanError::Again`] for a call that would not give its bits again; as [`GradBuilder::backward`].
    pub fn backward_recomputed(
        &mut self,
        body: &[OpCall],
        stretches: &[Stretch],
    ) -> Result<(), PlanError> {
        let mut end = body.len();
        let written = Written::by(&self.program.slots, body);
        for stretch in stretches.iter().rev().filter(|s| !s.keeps_all()) {
            self.backward(&body[stretch.calls.end..end])?;
            self.backward_again(&body[stretch.calls.clone()], stretch, &written)?;
            end = stretch.calls.start;
        }
        self.backward(&body[..end])
    }

    /// The calls that stand again.
    pub fn repeated(&self) -> Vec<Repeated> {
        self.repeated.clone()
    }

    fn backward_again(
        &mut self,
        calls: &[OpCall],
        stretch: &Stretch,
        written: &Written,
    ) -> Result<(), PlanError> {
        let plan = Standing::of(&self.program.slots, (calls, stretch), written)?;
        self.check_unchanged(stretch.calls.start, &plan, written)?;
        let mut twins = Twins {
            roots: plan.roots,
            slots: BTreeMap::new(),
        };
        let (mut all, mut again) = (Vec::with_capacity(calls.len()), Vec::new());
        for (bounds, unit) in plan.bounds.iter().zip(&plan.units) {
            let slots = &mut self.program.slots;
            all.extend(twins.calls(slots, &calls[bounds.clone()])?);
            if let Some(unit) = unit {
                again.push(twins.calls(slots, unit)?);
            }
        }
        // What later calls have found of the gradients of these tensors is that of their twins.
        for (slot, gradient) in self.gradients.clone() {
            let twin = twins.get(&mut self.program.slots, slot)?;
            self.gradients.insert(twin, gradient);
        }
        self.mark_needed(&again.concat());
        let first = self.program.calls.len();
        self.backward(&all)?;
        let rest = self.program.calls.split_off(first);
        let slots = &self.program.slots;
        let rest = schedule::units(slots, &rest);
        let own: BTreeSet<Slot> = twins.slots.into_values().collect();
        let read = schedule::found_of(slots, &rest, &own);
        let again = schedule::read_ones(slots, again, (read.clone(), &own));
        self.note(&again, read);
        let calls = schedule::latest(&self.program.slots, again, rest);
        self.program.calls.extend(calls);
        Ok(())
    }

    /// Refuses a call that reads what has been written since forward read it: by a later call of forward, or by the
    /// backward of later layers.
    fn check_unchanged(
        &self,
        start: usize,
        plan: &Standing,
        written: &Written,
    ) -> Result<(), PlanError> {
        let slots = &self.program.slots;
        let derived = schedule::writes(slots, &self.program.calls[self.derived_from..]);
        for (bounds, unit) in plan.bounds.iter().zip(&plan.units) {
            let Some(unit) = unit else {
                continue;
            };
            let needs = schedule::needs(slots, unit).into_iter();
            let mut kept = needs.filter(|root| !plan.roots.contains(root));
            let after = start + bounds.end;
            let changed = kept.find(|&root| written.from(root, after) || derived.contains(&root));
            if let Some(root) = changed {
                return Err(refused(slots, unit, root, "inputs that stay as they were"));
            }
        }
        Ok(())
    }

    /// Notes what stands again, and what of it is `read` after it.
    fn note(&mut self, again: &[Unit], mut read: BTreeSet<Slot>) {
        let slots = &self.program.slots;
        for unit in again {
            let Some(&first) = unit.last().and_then(|call| call.writes.first()) else {
                continue;
            };
            let written = schedule::writes(slots, unit).into_iter();
            // A tensor that several calls write counts once, for the first of them.
            let written: Vec<Slot> = written.filter(|root| read.remove(root)).collect();
            self.repeated.push(Repeated {
                ops: unit.iter().map(|call| call.op.clone()).collect(),
                tensor: kind_of(&slots.spec(first).name),
                bytes: written.iter().map(|&root| slots.spec(root).bytes()).sum(),
            });
        }
    }
}
