//! The check before every replay. Its token is the only way to launch a graph.

use std::marker::PhantomData;

use crate::backend::ArenaId;
use crate::engine::hyper::Hyper;
use crate::error::GuardError;
use crate::layout::{Layout, Region};
use crate::num;

/// What was true when the graph was captured.
#[derive(Clone, Debug, PartialEq)]
pub struct Guard {
    facts: Facts,
}

/// What a replay depends on besides the graph itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    pub arena: ArenaId,
    /// Where every slot lies.
    pub slots: Vec<Region>,
    /// Where the values lie that change from step to step.
    pub scalars: Option<Region>,
    /// The hash of the manifest.
    pub manifest: blake3::Hash,
    /// The contract's version.
    pub contract: u32,
    /// `beta1, beta2, eps` as the program holds them.
    pub baked: [f64; 3],
}

impl Facts {
    /// The facts of a moment.
    pub fn gather(arena: ArenaId, layout: &Layout, manifest: blake3::Hash, hyper: &Hyper) -> Self {
        Facts {
            arena,
            slots: layout.regions().to_vec(),
            scalars: layout.scalars(),
            manifest,
            contract: num::VERSION,
            baked: [hyper.beta1, hyper.beta2, hyper.eps],
        }
    }
}

/// Permission for one replay; a launch consumes it.
#[derive(Debug)]
pub struct Admitted<'g> {
    guard: PhantomData<&'g Guard>,
}

impl Guard {
    /// A guard over what is true now.
    pub fn new(facts: Facts) -> Self {
        Guard { facts }
    }

    /// Compares what is true now with what was true at capture.
    ///
    /// # Errors
    /// The first fact that has changed, with both values.
    pub fn admit(
        &self,
        arena: ArenaId,
        layout: &Layout,
        manifest: blake3::Hash,
        hyper: &Hyper,
    ) -> Result<Admitted<'_>, GuardError> {
        let then = &self.facts;
        if arena != then.arena {
            return Err(GuardError::Arena {
                expected: then.arena.0,
                found: arena.0,
            });
        }
        if num::VERSION != then.contract {
            return Err(GuardError::Contract {
                expected: then.contract,
                found: num::VERSION,
            });
        }
        if manifest != then.manifest {
            return Err(GuardError::Manifest {
                expected: then.manifest.to_hex().to_string(),
                found: manifest.to_hex().to_string(),
            });
        }
        if layout.scalars() != then.scalars {
            let text = |scalars: Option<Region>| scalars.map_or("none".into(), range);
            return Err(GuardError::ScalarSlot {
                expected: text(then.scalars),
                found: text(layout.scalars()),
            });
        }
        self.check_slots(layout.regions())?;
        let names = ["beta1", "beta2", "eps"];
        let now = [hyper.beta1, hyper.beta2, hyper.eps];
        for ((name, expected), found) in names.into_iter().zip(then.baked).zip(now) {
            if expected.to_bits() != found.to_bits() {
                return Err(GuardError::Baked {
                    name,
                    expected: expected.to_string(),
                    found: found.to_string(),
                });
            }
        }
        Ok(Admitted { guard: PhantomData })
    }

    fn check_slots(&self, now: &[Region]) -> Result<(), GuardError> {
        let then = &self.facts.slots;
        if now.len() != then.len() {
            return Err(GuardError::SlotTable {
                expected: format!("{} slots", then.len()),
                found: format!("{} slots", now.len()),
            });
        }
        // Comparing all of them without a branch for each takes a fraction of the time.
        let bits = then.iter().zip(now).fold(0, |bits, (a, b)| {
            bits | (a.offset ^ b.offset) | (a.bytes ^ b.bytes)
        });
        if bits == 0 {
            return Ok(());
        }
        match then.iter().zip(now).position(|(a, b)| a != b) {
            None => Ok(()),
            Some(slot) => Err(GuardError::SlotTable {
                expected: place(slot, then[slot]),
                found: place(slot, now[slot]),
            }),
        }
    }
}

fn range(region: Region) -> String {
    format!("{}..{}", region.offset, region.end())
}

fn place(slot: usize, region: Region) -> String {
    format!("slot {slot} at {}", range(region))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Slot;
    use crate::program::SlotTable;
    use crate::shape::{DType, Role, TensorSpec};

    fn layout(elements: usize, more: usize) -> Layout {
        let mut slots = SlotTable::default();
        for n in std::iter::once(elements).chain(std::iter::repeat_n(4, more)) {
            slots.add(TensorSpec::new("t", [n], DType::F32, Role::Param));
        }
        let layout = Layout::plan(&slots, &[]);
        assert_eq!(layout.region(Slot(0)).bytes, elements * 4);
        layout
    }

    fn hash(text: &str) -> blake3::Hash {
        blake3::hash(text.as_bytes())
    }

    fn guard() -> Guard {
        let hyper = Hyper::default();
        Guard::new(Facts::gather(ArenaId(7), &layout(8, 1), hash("m"), &hyper))
    }

    #[test]
    fn unchanged_facts_are_admitted() {
        let admitted = guard()
            .admit(ArenaId(7), &layout(8, 1), hash("m"), &Hyper::default())
            .map(|_| ());
        assert_eq!(admitted, Ok(()));
    }

    #[test]
    fn each_changed_fact_trips_its_own_guard() {
        let hyper = Hyper::default();
        let guard = guard();
        let refused = |arena, layout: &Layout, manifest, hyper: &Hyper| {
            guard
                .admit(ArenaId(arena), layout, hash(manifest), hyper)
                .unwrap_err()
        };
        let same = layout(8, 1);
        assert!(matches!(
            refused(8, &same, "m", &hyper),
            GuardError::Arena {
                expected: 7,
                found: 8
            }
        ));
        assert!(matches!(
            refused(7, &same, "n", &hyper),
            GuardError::Manifest { .. }
        ));
        assert!(matches!(
            refused(7, &layout(9, 1), "m", &hyper),
            GuardError::SlotTable { .. }
        ));
        assert!(matches!(
            refused(7, &layout(8, 2), "m", &hyper),
            GuardError::SlotTable { .. }
        ));
        for changed in [
            Hyper {
                beta1: 0.8,
                ..hyper
            },
            Hyper {
                beta2: 0.8,
                ..hyper
            },
            Hyper { eps: 1e-7, ..hyper },
        ] {
            assert!(matches!(
                refused(7, &same, "m", &changed),
                GuardError::Baked { .. }
            ));
        }
    }

    #[test]
    fn scalars_in_another_slot_of_the_same_places_are_refused() {
        let layout = |roles: [Role; 2]| {
            let mut slots = SlotTable::default();
            for role in roles {
                slots.add(TensorSpec::new("t", [8], DType::F32, role));
            }
            Layout::plan(&slots, &[])
        };
        let then = layout([Role::Input, Role::Scalars]);
        let hyper = Hyper::default();
        let guard = Guard::new(Facts::gather(ArenaId(7), &then, hash("m"), &hyper));
        let admit = |layout: &Layout| {
            let admitted = guard.admit(ArenaId(7), layout, hash("m"), &hyper);
            admitted.map(|_| ())
        };
        assert_eq!(admit(&then), Ok(()));
        let now = layout([Role::Scalars, Role::Input]);
        assert_eq!(now.regions(), then.regions());
        let refused = GuardError::ScalarSlot {
            expected: "256..288".into(),
            found: "0..32".into(),
        };
        assert_eq!(admit(&now), Err(refused));
    }

    #[test]
    fn another_contract_version_is_refused() {
        let mut guard = guard();
        guard.facts.contract += 1;
        let refused = guard
            .admit(ArenaId(7), &layout(8, 1), hash("m"), &Hyper::default())
            .map(|_| ());
        assert!(matches!(refused, Err(GuardError::Contract { .. })));
    }
}
