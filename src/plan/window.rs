//! The accumulation window: gradients of several passes, combined by the balanced tree over passes.
//!
//! The tree is built from the left as a binary counter. Level `l` holds the sum of `2^l` passes; after pass `i`,
//! counted from 0, its gradient takes in one level for each trailing one of `i` and is kept at the level after
//! them. The last pass takes in every level that is held, lowest first, and the update follows.
//!
//! A gradient with two contributions, such as that of an embedding that is the head too, is the sum of two trees;
//! the second one has partial sums of its own and is added when the update is made.

use super::place::Placed;
use super::{PlanConfig, Programs, StepInputs, StepOutputs, optimizer};
use crate::error::PlanError;
use crate::num::tree::TokenSum;
use crate::op::cross_entropy::LossSum;
use crate::op::step_values::SCALAR_WORDS;
use crate::op::tree_add::TreeAdd;
use crate::op::{OpCall, Slot, copy};
use crate::plan::ProgramKind;
use crate::program::ProgramBuilder;
use crate::shape::{DType, Role, TensorSpec};

/// The slots of an accumulation window.
#[derive(Clone, Debug)]
pub struct WindowSlots {
    /// The sum of a pass's losses, before it is divided by the normaliser.
    pub loss: Slot,
    /// Scalars that are all one: a sum that reads them is divided by nothing.
    pub ones: Slot,
    /// Second contributions to gradients: the gradient, and the slot of the second sum.
    pub seconds: Vec<(Slot, Slot)>,
    /// The partial sums, lowest level first.
    pub levels: Vec<WindowLevel>,
}

/// The partial sums of one level.
#[derive(Clone, Debug)]
pub struct WindowLevel {
    pub grad: Slot,
    pub loss: Slot,
    /// Of each second contribution.
    pub seconds: Vec<Slot>,
}

/// Declares what a pass writes besides its gradient.
pub(super) fn declare(
    program: &mut ProgramBuilder,
    derived: &mut Vec<(Slot, Vec<f32>)>,
) -> WindowSlots {
    let mut add = |name: &str, elements: usize, role| {
        program
            .slots
            .add(TensorSpec::new(name, [elements], DType::F32, role))
    };
    let ones = add("ones", SCALAR_WORDS, Role::Derived);
    derived.push((ones, vec![1.0; SCALAR_WORDS]));
    WindowSlots {
        loss: add("window.loss", 1, Role::Window),
        ones,
        seconds: Vec::new(),
        levels: Vec::new(),
    }
}

impl WindowSlots {
    /// Every slot of the window with what it is called in a checkpoint: `grad`, `loss` and the second
    /// contributions of one level.
    pub fn level_tensors(&self, level: usize) -> Vec<(String, Slot)> {
        let Some(of) = self.levels.get(level) else {
            return Vec::new();
        };
        let seconds = of.seconds.iter().enumerate();
        let seconds = seconds.map(|(i, &slot)| (format!("second.{i}"), slot));
        let mut all = vec![("grad".to_owned(), of.grad), ("loss".to_owned(), of.loss)];
        all.extend(seconds);
        all
    }

    /// Declares the levels; second contributions are known by now.
    pub(super) fn declare_levels(
        &mut self,
        program: &mut ProgramBuilder,
        placed: &Placed,
        levels: usize,
    ) {
        for level in 0..levels {
            let mut like = |what: String, slot: Slot| {
                let shape = program.slots.spec(slot).shape.clone();
                let name = format!("window.{level}.{what}");
                let spec = TensorSpec::new(name, shape, DType::F32, Role::Window);
                program.slots.add(spec)
            };
            let seconds = self.seconds.iter().enumerate();
            self.levels.push(WindowLevel {
                grad: like("grad".into(), placed.arenas.grad),
                loss: like("loss".into(), self.loss),
                seconds: seconds
                    .map(|(i, &(_, second))| like(format!("second.{i}"), second))
                    .collect(),
            });
        }
    }

    /// Appends the programs that merge and keep levels, and the one that updates.
    pub(super) fn programs(
        &self,
        program: &mut ProgramBuilder,
        (placed, config): (&Placed, &PlanConfig),
        (inputs, outputs): (&StepInputs, StepOutputs),
        programs: &mut Programs,
    ) -> Result<(), PlanError> {
        for (level, of) in self.levels.iter().enumerate() {
            let kind = level as u8;
            for (now, held) in self.pairs(placed, of) {
                add(program, held, now);
            }
            programs.add(ProgramKind::Merge(kind), std::mem::take(&mut program.calls));
            for (now, held) in self.pairs(placed, of) {
                let elements = program.slots.spec(now).shape.elements();
                program.call(copy::Copy { elements }, vec![now], vec![held]);
            }
            programs.add(ProgramKind::Keep(kind), std::mem::take(&mut program.calls));
        }
        let apply = self.apply(program, (placed, config), (inputs, outputs));
        programs.add(ProgramKind::Apply, apply);
        for (_, calls) in programs.iter() {
            program.slots.check_operands_of(calls)?;
        }
        Ok(())
    }

    fn apply(
        &self,
        program: &mut ProgramBuilder,
        (placed, config): (&Placed, &PlanConfig),
        (inputs, outputs): (&StepInputs, StepOutputs),
    ) -> Vec<OpCall> {
        for &(grad, second) in &self.seconds {
            add(program, second, grad);
        }
        let sum = TokenSum {
            tokens: 1,
            grain: 1,
            piece: 1,
        };
        let reads = vec![self.loss, inputs.scalars];
        program.call(LossSum { sum }, reads, vec![outputs.loss]);
        optimizer::append(program, placed, config, (inputs, outputs));
        std::mem::take(&mut program.calls)
    }

    /// What a pass leaves beside what a level holds of it.
    fn pairs(&self, placed: &Placed, level: &WindowLevel) -> Vec<(Slot, Slot)> {
        let seconds = self.seconds.iter().zip(&level.seconds);
        let mut pairs = vec![(placed.arenas.grad, level.grad), (self.loss, level.loss)];
        pairs.extend(seconds.map(|(&(_, now), &held)| (now, held)));
        pairs
    }
}

fn add(program: &mut ProgramBuilder, right: Slot, left: Slot) {
    let elements = program.slots.spec(left).shape.elements();
    program.call(TreeAdd { elements }, vec![right], vec![left]);
}
