//! The accumulation window: passes whose gradients are combined by a tree before one update.
//!
//! A pass leaves its gradient; what follows from the number of passes before it says which partial sums it takes in
//! and where it is kept ([`crate::plan::WindowSlots`] has the tree). A pass either happens whole or, when it is
//! refused, changes nothing.

use super::hyper::Hyper;
use super::programs::RunPrograms;
use super::step::{Observe, StepReport};
use crate::backend::Backend;
use crate::data::Batch;
use crate::error::StepError;
use crate::op::Slot;
use crate::op::step_values::StepScalars;
use crate::plan::ProgramKind;

/// The passes that no update has taken in yet.
#[derive(Clone, Debug, PartialEq)]
pub struct Window {
    /// So many; their gradients stand in the partial sums.
    pub passes: u64,
    /// What the sum of losses is divided by, the same for every pass.
    pub normaliser: f64,
    /// Targets that were scored.
    pub scored: usize,
    /// The digest of the batch whose parts the passes are; `None` where each has a batch of its own.
    pub batch: Option<blake3::Hash>,
}

/// What follows a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// Its gradient is kept, and the window stays open.
    Keep,
    /// The update takes in the whole window.
    Update,
}

/// A pass that is about to run.
pub(super) struct Pass<'b> {
    /// The programs that leave the pass's gradient.
    pub programs: Vec<ProgramKind>,
    /// The batch that is written before them; `None` where it stands in the arena already.
    pub batch: Option<&'b Batch>,
    /// What else is written before them.
    pub writes: Vec<(Slot, Vec<u8>)>,
    pub scalars: StepScalars,
    /// The window that the pass opens, or goes on with.
    pub window: Window,
    pub then: Then,
}

/// The programs after pass `index` of a window, counted from 0.
fn after(index: u64, then: Then) -> Vec<ProgramKind> {
    let merges = |levels: &mut dyn Iterator<Item = u32>| -> Vec<ProgramKind> {
        levels.map(|l| ProgramKind::Merge(l as u8)).collect()
    };
    match then {
        Then::Keep => {
            let level = index.trailing_ones();
            let mut programs = merges(&mut (0..level));
            programs.push(ProgramKind::Keep(level as u8));
            programs
        }
        Then::Update => {
            let mut held = (0..u64::BITS).filter(|level| index >> level & 1 == 1);
            let mut programs = merges(&mut held);
            programs.push(ProgramKind::Apply);
            programs
        }
    }
}

/// Runs a pass and what follows it; the report of the update, where there is one.
pub(super) fn run_pass<B: Backend, E: RunPrograms<B>>(
    engine: &mut E,
    pass: Pass,
    hyper: &Hyper,
    mut observer: Option<&mut dyn Observe<B>>,
) -> Result<Option<StepReport>, StepError> {
    let core = engine.core();
    let index = core.window.as_ref().map_or(0, |w| w.passes);
    if let Some(open) = &core.window {
        check_same(open, &pass.window)?;
    }
    let programs = [pass.programs, after(index, pass.then)].concat();
    if let Some(&lacking) = programs.iter().find(|&&kind| core.calls(kind).is_empty()) {
        return Err(match lacking {
            ProgramKind::Keep(_) | ProgramKind::Merge(_) => StepError::WindowFull {
                most: 1 << core.plan.window.as_ref().map_or(0, |w| w.levels.len()),
            },
            other => StepError::NoProgram {
                program: other.to_string(),
            },
        });
    }
    engine.admit_all(&programs, hyper)?;
    match pass.batch {
        Some(batch) => engine.core().write_inputs(batch, pass.scalars)?,
        None => engine.core().write_scalars(pass.scalars)?,
    }
    for (slot, bytes) in &pass.writes {
        engine.core().write_bytes(*slot, bytes)?;
    }
    for kind in programs {
        // An observer is lent again to each program.
        let lent = observer.as_mut().map(|o| &mut **o as &mut dyn Observe<B>);
        engine.run_program(kind, hyper, lent)?;
    }
    let before = engine.core().window.take();
    let scored = pass.window.scored + before.map_or(0, |w| w.scored);
    match pass.then {
        Then::Keep => {
            engine.core().window = Some(Window {
                passes: index + 1,
                scored,
                ..pass.window
            });
            Ok(None)
        }
        Then::Update => {
            let report = engine.core().commit(scored, hyper)?;
            engine.count_step();
            Ok(Some(report))
        }
    }
}

/// Checks that a pass belongs to the window that is open.
fn check_same(open: &Window, pass: &Window) -> Result<(), StepError> {
    if open.batch != pass.batch {
        let text = |digest: Option<blake3::Hash>| {
            digest.map_or_else(|| "a batch of each pass".to_owned(), |d| d.to_string())
        };
        return Err(StepError::OtherBatch {
            passes: open.passes,
            expected: text(open.batch),
            found: text(pass.batch),
        });
    }
    match open.normaliser.to_bits() == pass.normaliser.to_bits() {
        true => Ok(()),
        false => Err(StepError::OtherNormaliser {
            expected: open.normaliser,
            found: pass.normaliser,
        }),
    }
}

/// A batch that was checked once for all its passes.
pub(super) struct Parts<'b> {
    batch: &'b Batch,
    digest: blake3::Hash,
    scalars: StepScalars,
}

impl<'b> Parts<'b> {
    /// Checks a whole batch against the plan and the open window; changes nothing.
    pub fn of<B: Backend, E: RunPrograms<B>>(
        engine: &mut E,
        batch: &'b Batch,
        hyper: &Hyper,
    ) -> Result<Self, StepError> {
        let core = engine.core();
        let scalars = core.validate_of(core.plan.config.batch, batch, hyper)?;
        Ok(Parts {
            batch,
            digest: batch.digest(),
            scalars,
        })
    }

    /// Runs the next pass over the batch.
    pub fn pass<B: Backend, E: RunPrograms<B>>(
        &self,
        engine: &mut E,
        hyper: &Hyper,
        observer: Option<&mut dyn Observe<B>>,
    ) -> Result<Option<StepReport>, StepError> {
        let core = engine.core();
        let (sequences, passes) = (core.plan.inputs.batch, core.plan.config.passes());
        let done = core.window.as_ref().map_or(0, |w| w.passes as usize);
        let start = (done * sequences).min(self.batch.batch - sequences);
        let part = self.batch.sequences(start..start + sequences);
        let pass = Pass {
            programs: vec![ProgramKind::Accumulate],
            batch: Some(&part),
            writes: Vec::new(),
            scalars: self.scalars,
            window: Window {
                passes: 0,
                normaliser: self.batch.normaliser(),
                scored: part.active_targets(),
                batch: Some(self.digest),
            },
            then: match done + 1 < passes {
                true => Then::Keep,
                false => Then::Update,
            },
        };
        run_pass(engine, pass, hyper, observer)
    }

    /// Runs every pass that is left.
    pub fn step<B: Backend, E: RunPrograms<B>>(
        &self,
        engine: &mut E,
        hyper: &Hyper,
        mut observer: Option<&mut dyn Observe<B>>,
    ) -> Result<StepReport, StepError> {
        loop {
            let lent = observer.as_mut().map(|o| &mut **o as &mut dyn Observe<B>);
            if let Some(report) = self.pass(engine, hyper, lent)? {
                return Ok(report);
            }
        }
    }
}

/// Refuses a step at once while passes wait for their update.
pub(super) fn check_closed(window: Option<&Window>) -> Result<(), StepError> {
    match window {
        None => Ok(()),
        Some(open) => Err(StepError::WindowOpen {
            passes: open.passes,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::num::tree::TreeFold;
    use std::collections::BTreeMap;

    /// What the programs build over any number of passes is the tree that the streaming fold builds.
    #[test]
    fn passes_are_combined_by_the_balanced_tree() {
        for passes in 1..70u64 {
            let mut held: BTreeMap<u8, String> = BTreeMap::new();
            let mut gradient = String::new();
            let mut fold = TreeFold::new();
            let merge = |a: String, b: String| format!("({a} {b})");
            for index in 0..passes {
                fold.push(index.to_string(), merge);
                gradient = index.to_string();
                let then = match index + 1 < passes {
                    true => Then::Keep,
                    false => Then::Update,
                };
                for program in after(index, then) {
                    match program {
                        ProgramKind::Merge(level) => {
                            gradient = merge(held.remove(&level).expect("held"), gradient);
                        }
                        ProgramKind::Keep(level) => {
                            assert_eq!(held.insert(level, gradient.clone()), None);
                        }
                        other => assert_eq!(other, ProgramKind::Apply),
                    }
                }
            }
            assert!(held.is_empty(), "{passes} passes leave partial sums");
            assert_eq!(Some(gradient), fold.finish(merge), "{passes} passes");
        }
    }
}
