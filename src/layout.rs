//! Places every slot in one arena. After the layout nothing allocates, so no address can change.
//!
//! Persistent tensors never share a byte. Step-local tensors share the rest of the arena: two of them
//! may lie over each other when no program has both alive at one call.

use std::collections::BTreeMap;

use crate::op::{OpCall, Slot};
use crate::program::SlotTable;
use crate::shape::Role;

/// Every slot of its own starts at a multiple of this many bytes.
pub const ALIGNMENT: usize = 256;

/// Bytes of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Region {
    pub offset: usize,
    pub bytes: usize,
}

impl Region {
    /// The first byte after the region.
    pub fn end(&self) -> usize {
        self.offset + self.bytes
    }

    /// Whether the two share a byte.
    pub fn overlaps(&self, other: &Region) -> bool {
        self.offset < other.end() && other.offset < self.end()
    }
}

/// A call with its operands placed.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacedCall {
    pub call: OpCall,
    pub reads: Vec<Region>,
    pub writes: Vec<Region>,
}

/// Where every slot lies.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    regions: Vec<Region>,
    arena_bytes: usize,
    persistent_bytes: usize,
    by_role: BTreeMap<Role, usize>,
    scalars: Option<Region>,
}

impl Layout {
    /// Plans the arena for `programs`, which run one after another over the same slots.
    pub fn plan(slots: &SlotTable, programs: &[&[OpCall]]) -> Self {
        let mut regions = vec![
            Region {
                offset: 0,
                bytes: 0
            };
            slots.len()
        ];
        let mut end = 0;
        for (slot, def) in slots.iter() {
            if def.view.is_none() && def.spec.role.persistent() {
                let bytes = def.spec.bytes();
                regions[slot.index()] = Region { offset: end, bytes };
                end = align(end + bytes);
            }
        }
        let persistent_bytes = end;
        let mut arena_bytes = end;
        let lives = lifetimes(slots, programs);
        place_local(slots, &lives, persistent_bytes, &mut regions);
        let mut by_role = BTreeMap::new();
        for (slot, def) in slots.iter() {
            match def.view {
                None => {
                    *by_role.entry(def.spec.role).or_insert(0) += def.spec.bytes();
                    arena_bytes = arena_bytes.max(align(regions[slot.index()].end()));
                }
                Some(_) => {
                    let (root, range) = slots.root(slot);
                    regions[slot.index()] = Region {
                        offset: regions[root.index()].offset + range.start * def.spec.dtype.size(),
                        bytes: def.spec.bytes(),
                    };
                }
            }
        }
        let scalars = slots.iter().find(|(_, d)| d.spec.role == Role::Scalars);
        Layout {
            scalars: scalars.map(|(slot, _)| regions[slot.index()]),
            regions,
            arena_bytes,
            persistent_bytes,
            by_role,
        }
    }

    /// Where a slot lies.
    pub fn region(&self, slot: Slot) -> Region {
        self.regions[slot.index()]
    }

    /// The places of all slots, in table order.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Bytes of the whole arena.
    pub fn arena_bytes(&self) -> usize {
        self.arena_bytes
    }

    /// Bytes of the tensors that survive a step; the step-local ones lie behind them.
    pub fn persistent_bytes(&self) -> usize {
        self.persistent_bytes
    }

    /// Where the values of a step lie that are written anew before each; `None` in a layout without.
    pub fn scalars(&self) -> Option<Region> {
        self.scalars
    }

    /// Bytes of all tensors of a role, before step-local ones share memory.
    pub fn role_bytes(&self, role: Role) -> usize {
        self.by_role.get(&role).copied().unwrap_or(0)
    }

    /// A program with its operands placed.
    pub fn place(&self, calls: &[OpCall]) -> Vec<PlacedCall> {
        let regions = |slots: &[Slot]| slots.iter().map(|&s| self.region(s)).collect();
        calls
            .iter()
            .map(|call| PlacedCall {
                reads: regions(&call.reads),
                writes: regions(&call.writes),
                call: call.clone(),
            })
            .collect()
    }

    /// The arena by role, a line each, with what sharing saves.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        for role in Role::ALL {
            let bytes = self.role_bytes(role);
            if bytes > 0 {
                text += &format!("{:<12} {bytes:>14} bytes\n", role.name());
            }
        }
        let local = self.role_bytes(Role::Activation) + self.role_bytes(Role::Scratch);
        let shared = self.arena_bytes - self.persistent_bytes;
        text += &format!("step-local tensors share {shared} bytes instead of {local}\n");
        text += &format!("{:<12} {:>14} bytes\n", "arena", self.arena_bytes);
        text
    }
}

/// A step-local slot and, for each program, the first and last call that touches it.
struct Life {
    slot: Slot,
    calls: Vec<Option<(usize, usize)>>,
}

impl Life {
    fn meets(&self, other: &Life) -> bool {
        self.calls.iter().zip(&other.calls).any(|pair| match pair {
            (Some(a), Some(b)) => a.0 <= b.1 && b.0 <= a.1,
            _ => false,
        })
    }
}

fn lifetimes(slots: &SlotTable, programs: &[&[OpCall]]) -> Vec<Life> {
    let mut spans: BTreeMap<Slot, Vec<Option<(usize, usize)>>> = BTreeMap::new();
    for (p, calls) in programs.iter().enumerate() {
        for (index, call) in calls.iter().enumerate() {
            for &slot in call.reads.iter().chain(&call.writes) {
                let (root, _) = slots.root(slot);
                if slots.spec(root).role.persistent() {
                    continue;
                }
                let spans = spans
                    .entry(root)
                    .or_insert_with(|| vec![None; programs.len()]);
                let span = &mut spans[p];
                *span = Some(span.map_or((index, index), |(first, _)| (first, index)));
            }
        }
    }
    spans
        .into_iter()
        .map(|(slot, calls)| Life { slot, calls })
        .collect()
}

/// Largest first; each at the lowest offset where it meets no placed tensor that is alive with it.
fn place_local(slots: &SlotTable, lives: &[Life], base: usize, regions: &mut [Region]) {
    let mut order: Vec<&Life> = lives.iter().collect();
    order.sort_by_key(|life| (std::cmp::Reverse(slots.spec(life.slot).bytes()), life.slot));
    let mut placed: Vec<&Life> = Vec::new();
    for life in order {
        let bytes = slots.spec(life.slot).bytes();
        let mut taken: Vec<Region> = placed
            .iter()
            .filter(|other| other.meets(life))
            .map(|other| regions[other.slot.index()])
            .collect();
        taken.sort();
        let mut offset = base;
        for region in taken {
            if region.offset >= offset + bytes {
                break;
            }
            offset = offset.max(align(region.end()));
        }
        regions[life.slot.index()] = Region { offset, bytes };
        placed.push(life);
    }
}

fn align(offset: usize) -> usize {
    offset.next_multiple_of(ALIGNMENT)
}
