//! Derives the backward calls of a step from its forward calls.
//!
//! The forward list is walked from its end; every op emits its own backward. A tensor's gradient is
//! complete before the op that produced it is reached, because every reader comes later.

pub mod recompute;
pub mod schedule;

use std::collections::{BTreeMap, BTreeSet};

use crate::error::PlanError;
use crate::num::tree::{TokenSum, weight_piece};
use crate::op::copy::FillNeutral;
use crate::op::{Op, OpCall, Slot, Store};
use crate::plan::TokenCut;
use crate::program::ProgramBuilder;
use crate::shape::{DType, Math, Role, Shape, TensorSpec};

/// What the backward of each op sees: where gradients are, and where to put new ones.
pub struct GradBuilder<'a> {
    program: &'a mut ProgramBuilder,
    cut: TokenCut,
    /// The parameter arena and the gradient arena; a parameter's gradient lies at its own offset.
    arenas: (Slot, Slot),
    /// Tensors that depend on a trainable parameter.
    needed: BTreeSet<Slot>,
    gradients: BTreeMap<Slot, Slot>,
    /// Gradients of parameters, by the parameter's slot, once something was written to them.
    parameters: BTreeMap<Slot, Slot>,
    /// While a chunk of the head is derived: the weight whose gradient goes to a partial, the partial, and
    /// whether it is assigned or added to.
    partial: Option<(Slot, (Slot, Store))>,
    /// Where passes are accumulated: second contributions to gradients of parameters, each with the sum it is
    /// kept apart in.
    apart: Option<Vec<(Slot, Slot)>>,
    /// Outputs that backward writes again where something waits for them.
    restorable: BTreeSet<Slot>,
    /// What waits for an output to be written again.
    waiting: BTreeMap<Slot, Vec<Waiting>>,
    /// The first call of the program that is part of the derivation.
    derived_from: usize,
    repeated: Vec<recompute::Repeated>,
}

/// A backward call that reads a gradient and an output of forward, which backward writes again before it.
pub struct Waiting {
    op: Op,
    gradient: Slot,
    target: Slot,
}

impl<'a> GradBuilder<'a> {
    /// A derivation over the forward calls that stand in `program` now.
    pub fn new(program: &'a mut ProgramBuilder, cut: TokenCut, arenas: (Slot, Slot)) -> Self {
        let calls = program.calls.clone();
        GradBuilder::over(program, &calls, (cut, arenas))
    }

    /// A derivation over forward calls that stand in another program over the same slots.
    pub fn over(
        program: &'a mut ProgramBuilder,
        calls: &[OpCall],
        (cut, arenas): (TokenCut, (Slot, Slot)),
    ) -> Self {
        let derived_from = program.calls.len();
        let mut grads = GradBuilder {
            program,
            cut,
            arenas,
            needed: BTreeSet::new(),
            gradients: BTreeMap::new(),
            parameters: BTreeMap::new(),
            partial: None,
            apart: None,
            restorable: BTreeSet::new(),
            waiting: BTreeMap::new(),
            derived_from,
            repeated: Vec::new(),
        };
        grads.mark_needed(calls);
        grads
    }

    /// From now on a second contribution to a parameter's gradient goes to a sum of its own: passes are
    /// accumulated by a tree for each contribution, and only the trees' roots are added.
    pub fn keep_apart(&mut self) {
        self.apart = Some(Vec::new());
    }

    /// The second contributions that are kept apart: the gradient, and the slot of the sum.
    pub fn seconds(&self) -> Vec<(Slot, Slot)> {
        self.apart.clone().unwrap_or_default()
    }

    /// Marks what depends on a trainable parameter through `calls`, and what of it backward may write again.
    fn mark_needed(&mut self, calls: &[OpCall]) {
        for call in calls {
            let depends = call
                .reads
                .iter()
                .chain(&call.writes)
                .any(|&s| self.needs_gradient(s) || self.is_trainable(s));
            if depends {
                self.needed.extend(&call.writes);
                self.mark_restorable(call);
            }
        }
    }

    /// Marks the first output of a call if backward may write it again: one that is large enough.
    fn mark_restorable(&mut self, call: &OpCall) {
        let Some(&output) = call.writes.first() else {
            return;
        };
        let elements = self.program.slots.spec(output).shape.elements();
        if call.op.rule().is_restorable() && elements >= self.program.restored_elements {
            self.restorable.insert(output);
        }
    }

    /// Appends forward calls and returns them; what they write becomes part of the derivation.
    pub fn forward(&mut self, emit: impl FnOnce(&mut ProgramBuilder)) -> Vec<OpCall> {
        let first = self.program.calls.len();
        emit(self.program);
        let calls = self.program.calls[first..].to_vec();
        self.mark_needed(&calls);
        calls
    }

    /// Forgets the gradient of a slot that the next chunk uses again.
    pub fn forget(&mut self, slot: Slot) {
        self.gradients.remove(&slot);
    }

    /// Emits the backward of `calls`, last call first.
    pub fn backward(&mut self, calls: &[OpCall]) -> Result<(), PlanError> {
        for call in calls.iter().rev() {
            if call.writes.iter().any(|s| self.needed.contains(s)) {
                call.op.rule().backward(call, self)?;
            }
        }
        match self.waiting.keys().next() {
            Some(&slot) => Err(PlanError::MissingGradient {
                op: "restored output",
                tensor: self.name(slot),
            }),
            None => Ok(()),
        }
    }

    /// Assigns the gradient of `weight` to a target, or adds it there, until the next call; used for partial sums.
    pub fn redirect(&mut self, weight: Slot, target: Option<(Slot, Store)>) {
        let weight = self.program.master(weight);
        self.partial = target.map(|t| (weight, t));
    }

    /// Notes that the gradient of a parameter has been assigned whole.
    pub fn mark_assigned(&mut self, weight: Slot) -> Result<Slot, PlanError> {
        let grad = self.gradient_view(weight)?;
        self.parameters.insert(self.program.master(weight), grad);
        Ok(grad)
    }

    /// The parameters whose gradient has been written.
    pub fn reached(&self) -> impl Iterator<Item = Slot> {
        self.parameters.keys().copied()
    }

    /// The view of the gradient arena at a parameter's offset.
    pub fn gradient_view(&mut self, weight: Slot) -> Result<Slot, PlanError> {
        let weight = self.program.master(weight);
        if let Some(&grad) = self.parameters.get(&weight) {
            return Ok(grad);
        }
        let (_, range) = self.program.slots.root(weight);
        let spec = self.program.slots.spec(weight).clone();
        let name = format!("grad.{}", spec.name);
        self.program
            .slots
            .view(self.arenas.1, range.start, name, spec.shape)
    }

    /// Whether a parameter, or the one of which a slot is the shadow, is trained.
    pub fn is_trainable(&self, slot: Slot) -> bool {
        let master = self.program.master(slot);
        self.program.slots.root(master).0 == self.arenas.0
    }

    /// Whether the gradient of an activation has a use.
    pub fn needs_gradient(&self, slot: Slot) -> bool {
        self.needed
            .iter()
            .any(|&n| self.program.slots.overlap(n, slot))
    }

    /// The complete gradient of a tensor that a forward call wrote.
    ///
    /// # Errors
    /// [`PlanError::MissingGradient`] when no later call produced it.
    pub fn incoming(&self, slot: Slot, op: &'static str) -> Result<Slot, PlanError> {
        self.gradients
            .get(&slot)
            .copied()
            .ok_or_else(|| PlanError::MissingGradient {
                op,
                tensor: self.name(slot),
            })
    }

    /// The gradients of a tensor that several calls have read whole, each with a gradient of its own: that
    /// of the tensor itself first, then those of the views that cover it, in slot order.
    ///
    /// # Errors
    /// [`PlanError::MissingGradient`] when no later call produced one.
    pub fn incoming_parts(&self, slot: Slot, op: &'static str) -> Result<Vec<Slot>, PlanError> {
        let place = self.program.slots.root(slot);
        let parts = self.gradients.iter();
        let parts: Vec<Slot> = parts
            .filter(|(s, _)| self.program.slots.root(**s) == place)
            .map(|(_, &gradient)| gradient)
            .collect();
        match parts.is_empty() {
            true => Err(PlanError::MissingGradient {
                op,
                tensor: self.name(slot),
            }),
            false => Ok(parts),
        }
    }

    /// Where an op that can only assign puts its part of the gradient of a tensor that others read too,
    /// when it reads the tensor through a view of its own.
    ///
    /// # Errors
    /// [`PlanError::SecondGradient`] when the view has a gradient already.
    pub fn own_activation_target(
        &mut self,
        slot: Slot,
        op: &'static str,
    ) -> Result<Slot, PlanError> {
        match self.gradients.contains_key(&slot) {
            true => Err(self.second(slot, op)),
            false => Ok(self.add_gradient(slot)),
        }
    }

    /// Where an op that can add puts the gradient of an activation.
    pub fn activation_target(&mut self, slot: Slot) -> (Slot, Store) {
        match self.gradients.get(&slot) {
            Some(&grad) => (grad, Store::Add),
            None => (self.add_gradient(slot), Store::Assign),
        }
    }

    /// Where an op that can only assign puts the gradient of an activation. The gradient of a view
    /// is the same view of its parent's gradient.
    ///
    /// # Errors
    /// [`PlanError::SecondGradient`] when the gradient exists already.
    pub fn assigned_activation_target(
        &mut self,
        slot: Slot,
        op: &'static str,
    ) -> Result<Slot, PlanError> {
        if self.gradients.contains_key(&slot) {
            return Err(self.second(slot, op));
        }
        let (root, range) = self.program.slots.root(slot);
        if root == slot {
            return Ok(self.add_gradient(slot));
        }
        let (parent, _) = self.activation_target(root);
        let spec = self.program.slots.spec(slot).clone();
        let name = format!("d.{}", spec.name);
        let view = self
            .program
            .slots
            .view(parent, range.start, name, spec.shape)?;
        self.gradients.insert(slot, view);
        Ok(view)
    }

    /// Declares that the gradient of `slot` is what `gradient` holds.
    ///
    /// # Errors
    /// [`PlanError::SecondGradient`] when the gradient exists already.
    pub fn share(&mut self, slot: Slot, gradient: Slot, op: &'static str) -> Result<(), PlanError> {
        match self.gradients.insert(slot, gradient) {
            None => Ok(()),
            Some(_) => Err(self.second(slot, op)),
        }
    }

    /// Where the gradient of a parameter goes: assigned the first time, added afterwards.
    pub fn parameter_target(&mut self, weight: Slot) -> (Slot, Store) {
        let weight = self.program.master(weight);
        if let Some((redirected, target)) = self.partial
            && redirected == weight
        {
            return target;
        }
        match self.parameters.get(&weight) {
            Some(&grad) => (self.second_sum(grad), Store::Add),
            None => {
                // A parameter's view of the gradient arena has the parameter's own bounds.
                let grad = self.mark_assigned(weight).unwrap_or(self.arenas.1);
                (grad, Store::Assign)
            }
        }
    }

    /// What a second contribution is added to: the gradient itself, or a sum of its own that starts at the number
    /// which changes no other.
    fn second_sum(&mut self, grad: Slot) -> Slot {
        let Some(apart) = &mut self.apart else {
            return grad;
        };
        let spec = self.program.slots.spec(grad);
        let name = format!("window.second.{}", spec.name);
        let spec = TensorSpec::new(name, spec.shape.clone(), DType::F32, Role::Window);
        let elements = spec.shape.elements();
        let second = self.program.slots.add(spec);
        apart.push((grad, second));
        self.program
            .call(FillNeutral { elements }, Vec::new(), vec![second]);
        second
    }

    /// Where an op that can only assign puts the gradient of a parameter.
    ///
    /// # Errors
    /// [`PlanError::SecondGradient`] when another call wrote it already.
    pub fn assigned_parameter_target(
        &mut self,
        weight: Slot,
        op: &'static str,
    ) -> Result<Slot, PlanError> {
        match self.parameter_target(weight) {
            (grad, Store::Assign) => Ok(grad),
            (_, Store::Add) => Err(self.second(weight, op)),
        }
    }

    /// A tensor that lives only between neighbouring calls of the backward.
    pub fn scratch(&mut self, name: &str, shape: impl Into<Shape>) -> Slot {
        let spec = TensorSpec::new(name, shape, DType::F32, Role::Scratch);
        self.program.slots.add(spec)
    }

    /// Appends a backward call.
    pub fn emit(&mut self, op: impl Into<Op>, reads: Vec<Slot>, writes: Vec<Slot>) {
        self.program.call(op, reads, writes);
    }

    /// Appends a backward call that reads `gradient` and `x`, which a forward call wrote. Where backward writes `x`
    /// again the call waits for it.
    pub fn emit_reading(&mut self, op: impl Into<Op>, (gradient, x): (Slot, Slot), target: Slot) {
        if !self.restorable.contains(&x) {
            return self.emit(op, vec![gradient, x], vec![target]);
        }
        self.waiting.entry(x).or_default().push(Waiting {
            op: op.into(),
            gradient,
            target,
        });
    }

    /// A tensor in which backward writes `slot` again.
    pub fn restored(&mut self, slot: Slot) -> Slot {
        let spec = self.program.slots.spec(slot).clone();
        let name = format!("restored.{}", spec.name);
        let spec = TensorSpec::new(name, spec.shape, spec.dtype, Role::Activation);
        self.program.slots.add(spec)
    }

    /// The calls that wait for `x`; from now on none does.
    pub fn take_waiting(&mut self, x: Slot) -> Vec<Waiting> {
        self.waiting.remove(&x).unwrap_or_default()
    }

    /// Appends calls that have waited, now that `x` holds what they read.
    pub fn emit_waiting(&mut self, waiting: Vec<Waiting>, x: Slot) {
        for call in waiting {
            self.emit(call.op, vec![call.gradient, x], vec![call.target]);
        }
    }

    /// How a sum over `rows` tokens is cut; one chain a grain for `piece` of `None`.
    pub fn token_sum(&self, rows: usize, piece: Option<usize>) -> TokenSum {
        self.cut.sum(rows, piece)
    }

    /// How the sum over `rows` tokens of a weight gradient in `math` with `outputs` elements is cut.
    pub fn weight_sum(&self, math: Math, rows: usize, outputs: usize) -> TokenSum {
        let default = weight_piece(math, self.cut.grain, outputs);
        self.cut.sum(rows, Some(self.cut.piece.unwrap_or(default)))
    }

    /// The name of the first tensor a call writes; for error texts.
    pub fn first_write_name(&self, call: &OpCall) -> String {
        call.writes
            .first()
            .map_or_else(String::new, |&s| self.name(s))
    }

    fn add_gradient(&mut self, slot: Slot) -> Slot {
        let spec = self.program.slots.spec(slot).clone();
        let spec = TensorSpec::new(
            format!("d.{}", spec.name),
            spec.shape,
            spec.dtype,
            Role::Activation,
        );
        let grad = self.program.slots.add(spec);
        self.gradients.insert(slot, grad);
        grad
    }

    fn name(&self, slot: Slot) -> String {
        self.program.slots.spec(slot).name.clone()
    }

    fn second(&self, slot: Slot, op: &'static str) -> PlanError {
        PlanError::SecondGradient {
            op,
            tensor: self.name(slot),
        }
    }
}
