//! The program: a table of slots and the calls over them, known before anything runs.
//!
//! A slot either owns its place in the arena or is a view of another slot: a parameter is a view of
//! the parameter arena, a row chunk a view of its activation. A program never holds a pointer.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::error::PlanError;
use crate::op::nf4::Dequantise;
use crate::op::{Op, OpCall, Slot};
use crate::shape::{DType, Math, Role, Shape, TensorSpec};

/// One entry of the slot table.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotDef {
    pub spec: TensorSpec,
    /// The slot this one is a part of, and the element it starts at; `None` for a slot of its own.
    pub view: Option<(Slot, usize)>,
}

/// All slots of a plan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SlotTable {
    defs: Vec<SlotDef>,
}

impl SlotTable {
    /// Adds a slot with a place of its own.
    pub fn add(&mut self, spec: TensorSpec) -> Slot {
        self.push(SlotDef { spec, view: None })
    }

    /// Adds a view of `parent` that starts at element `start`.
    ///
    /// # Errors
    /// [`PlanError::ViewOutOfBounds`] when it reaches beyond the parent.
    pub fn view(
        &mut self,
        parent: Slot,
        start: usize,
        name: impl Into<String>,
        shape: impl Into<Shape>,
    ) -> Result<Slot, PlanError> {
        let owner = self.spec(parent);
        let spec = TensorSpec::new(name, shape, owner.dtype, owner.role);
        let end = start + spec.shape.elements();
        if end > owner.shape.elements() {
            return Err(PlanError::ViewOutOfBounds {
                view: spec.name,
                parent: owner.name.clone(),
                start,
                end,
                elements: owner.shape.elements(),
            });
        }
        Ok(self.push(SlotDef {
            spec,
            view: Some((parent, start)),
        }))
    }

    fn push(&mut self, def: SlotDef) -> Slot {
        self.defs.push(def);
        Slot((self.defs.len() - 1) as u32)
    }

    /// The description of a slot.
    pub fn spec(&self, slot: Slot) -> &TensorSpec {
        &self.defs[slot.index()].spec
    }

    /// Changes what the slot that owns the place of `slot` is for, and with it how long it lives.
    pub fn set_role(&mut self, slot: Slot, role: Role) {
        let (root, _) = self.root(slot);
        self.defs[root.index()].spec.role = role;
        self.defs[slot.index()].spec.role = role;
    }

    /// The slots in table order.
    pub fn iter(&self) -> impl Iterator<Item = (Slot, &SlotDef)> {
        self.defs
            .iter()
            .enumerate()
            .map(|(i, def)| (Slot(i as u32), def))
    }

    /// The number of slots.
    pub fn len(&self) -> usize {
        self.defs.len()
    }

    /// Whether there is no slot.
    pub fn is_empty(&self) -> bool {
        self.defs.is_empty()
    }

    /// The slot that owns the place of `slot`, and the elements of it that `slot` covers.
    pub fn root(&self, slot: Slot) -> (Slot, Range<usize>) {
        let (mut at, mut start) = (slot, 0);
        while let Some((parent, offset)) = self.defs[at.index()].view {
            start += offset;
            at = parent;
        }
        (at, start..start + self.spec(slot).shape.elements())
    }

    /// Whether two slots share an element.
    pub fn overlap(&self, a: Slot, b: Slot) -> bool {
        let ((root_a, range_a), (root_b, range_b)) = (self.root(a), self.root(b));
        root_a == root_b && range_a.start < range_b.end && range_b.start < range_a.end
    }

    /// Checks every call: operand counts, sizes and types against the op's signature, undeclared
    /// overlaps, and reads of step-local tensors that nothing wrote.
    ///
    /// # Errors
    /// The first call that does not fit, with its index and the tensor's name.
    pub fn check(&self, calls: &[OpCall]) -> Result<(), PlanError> {
        let mut written: Vec<Slot> = Vec::new();
        for (index, call) in calls.iter().enumerate() {
            self.check_operands(index, call)?;
            self.check_overlap(index, call)?;
            self.check_written(index, call, &written)?;
            written.extend(&call.writes);
        }
        Ok(())
    }

    /// As [`SlotTable::check`], for a program that reads what another one has left in step-local tensors.
    ///
    /// # Errors
    /// As [`SlotTable::check`].
    pub fn check_operands_of(&self, calls: &[OpCall]) -> Result<(), PlanError> {
        calls.iter().enumerate().try_for_each(|(index, call)| {
            self.check_operands(index, call)?;
            self.check_overlap(index, call)
        })
    }

    fn check_operands(&self, index: usize, call: &OpCall) -> Result<(), PlanError> {
        let rule = call.op.rule();
        let signature = rule.signature();
        let sides = [
            ("read", &signature.reads, &call.reads),
            ("write", &signature.writes, &call.writes),
        ];
        for (side, operands, slots) in sides {
            if operands.len() != slots.len() {
                return Err(PlanError::OperandCount {
                    call: index,
                    op: rule.stem(),
                    side,
                    expected: operands.len(),
                    found: slots.len(),
                });
            }
            for (operand, &slot) in operands.iter().zip(slots) {
                let spec = self.spec(slot);
                let fits = spec.dtype == operand.dtype
                    && spec.shape.elements() == operand.shape.elements();
                if !fits {
                    return Err(PlanError::Operand {
                        call: index,
                        op: rule.stem(),
                        operand: operand.name,
                        tensor: spec.name.clone(),
                        expected: format!("{}{}", operand.dtype, operand.shape),
                        found: format!("{}{}", spec.dtype, spec.shape),
                    });
                }
            }
        }
        Ok(())
    }

    fn check_overlap(&self, index: usize, call: &OpCall) -> Result<(), PlanError> {
        for (i, &write) in call.writes.iter().enumerate() {
            let others = call.reads.iter().chain(&call.writes[i + 1..]);
            if let Some(&other) = others.into_iter().find(|&&o| self.overlap(write, o)) {
                return Err(PlanError::Overlap {
                    call: index,
                    op: call.op.rule().stem(),
                    written: self.spec(write).name.clone(),
                    other: self.spec(other).name.clone(),
                });
            }
        }
        Ok(())
    }

    fn check_written(
        &self,
        index: usize,
        call: &OpCall,
        written: &[Slot],
    ) -> Result<(), PlanError> {
        for slot in call.reads.iter().copied().chain(call.updated()) {
            let local = !self.spec(slot).role.persistent();
            if local && !written.iter().any(|&w| self.overlap(w, slot)) {
                return Err(PlanError::ReadBeforeWrite {
                    call: index,
                    op: call.op.rule().stem(),
                    tensor: self.spec(slot).name.clone(),
                });
            }
        }
        Ok(())
    }
}

/// Builds slots and calls; models and the backward derivation write through it.
#[derive(Clone, Debug, Default)]
pub struct ProgramBuilder {
    pub slots: SlotTable,
    pub calls: Vec<OpCall>,
    /// How products are computed; models give it to the ops they call.
    pub math: Math,
    /// Elements from which on an output that backward can write again is not kept for it.
    pub restored_elements: usize,
    /// The calls with which layers begin, and the one after the last layer.
    layers: Vec<usize>,
    /// The shadow of a parameter arena, by the arena.
    shadow_arenas: BTreeMap<Slot, Shadow>,
    /// The parameter of which a slot is the shadow.
    masters: BTreeMap<Slot, Slot>,
    /// Weights stored as NF4, by the view of the shared scratch in which products read them.
    packed: BTreeMap<Slot, Vec<PackedPart>>,
}

/// The elements of a parameter arena that products read, rounded to their storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shadow {
    pub slot: Slot,
    /// The element of the arena whose shadow is the first one.
    pub first: usize,
}

/// A tensor stored as NF4 and its place in the shared scratch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedPart {
    /// The codes.
    pub codes: Slot,
    /// The block maxima.
    pub maxima: Slot,
    /// The view of the scratch that its numbers fill.
    pub weight: Slot,
}

impl ProgramBuilder {
    /// A builder of programs whose products are computed as `math` says.
    pub fn of(math: Math) -> Self {
        ProgramBuilder {
            math,
            ..ProgramBuilder::default()
        }
    }

    /// Says that the next call begins a layer, or that it comes after the last one. A model says it before each of
    /// its layers and once behind them, so that stretches of layers can be computed again.
    pub fn mark_layer(&mut self) {
        self.layers.push(self.calls.len());
    }

    /// The calls of the model in stretches of so many layers; what comes before and after the layers is in none.
    pub fn stretches(&self, layers: Option<usize>) -> Vec<Range<usize>> {
        let (Some(layers), Some(&end)) = (layers, self.layers.last()) else {
            return Vec::new();
        };
        let starts: Vec<usize> = self.layers[..self.layers.len() - 1]
            .iter()
            .copied()
            .step_by(layers.max(1))
            .collect();
        let ends = starts.iter().skip(1).copied().chain([end]);
        starts
            .iter()
            .copied()
            .zip(ends)
            .map(|(a, b)| a..b)
            .collect()
    }

    /// A step-local tensor in the storage of products: what they read and write.
    pub fn narrow_activation(&mut self, name: impl Into<String>, shape: impl Into<Shape>) -> Slot {
        let storage = self.math.storage();
        self.slots
            .add(TensorSpec::new(name, shape, storage, Role::Activation))
    }

    /// Declares the shadow of a parameter arena: these elements of it rounded to the storage of products, in the
    /// same order. `None` where products read the parameters themselves.
    pub fn shadow_arena(
        &mut self,
        arena: Slot,
        name: &str,
        elements: Range<usize>,
    ) -> Option<Shadow> {
        let storage = self.math.storage();
        if storage == self.slots.spec(arena).dtype {
            return None;
        }
        let spec = TensorSpec::new(name, [elements.len()], storage, Role::Derived);
        let shadow = Shadow {
            slot: self.slots.add(spec),
            first: elements.start,
        };
        self.shadow_arenas.insert(arena, shadow);
        Some(shadow)
    }

    /// The parameter arenas that have a shadow, each with it.
    pub fn shadows(&self) -> Vec<(Slot, Shadow)> {
        self.shadow_arenas.iter().map(|(&a, &s)| (a, s)).collect()
    }

    /// What a product reads for the parameter `weight`: its shadow where there is one.
    ///
    /// # Errors
    /// [`PlanError::ViewOutOfBounds`] when the weight is not among the elements that have a shadow.
    pub fn product_operand(&mut self, weight: Slot) -> Result<Slot, PlanError> {
        let (root, range) = self.slots.root(weight);
        let Some(&shadow) = self.shadow_arenas.get(&root) else {
            return Ok(weight);
        };
        if let Some((&known, _)) = self.masters.iter().find(|(_, master)| **master == weight) {
            return Ok(known);
        }
        let spec = self.slots.spec(weight);
        let (name, shape) = (format!("shadow.{}", spec.name), spec.shape.clone());
        // What starts before the shadow is refused as what ends behind it.
        let behind = self.slots.spec(shadow.slot).shape.elements();
        let start = range.start.checked_sub(shadow.first).unwrap_or(behind);
        let view = self.slots.view(shadow.slot, start, name, shape)?;
        self.masters.insert(view, weight);
        Ok(view)
    }

    /// The parameter of which `slot` is the shadow, or the slot itself.
    pub fn master(&self, slot: Slot) -> Slot {
        self.masters.get(&slot).copied().unwrap_or(slot)
    }

    /// A step-local f32 tensor that later calls read.
    pub fn activation(&mut self, name: impl Into<String>, shape: impl Into<Shape>) -> Slot {
        self.slots
            .add(TensorSpec::new(name, shape, DType::F32, Role::Activation))
    }

    /// Declares that `weight`, a view of the scratch that all packed weights share, consists of these
    /// parts. Every call that reads it is preceded by the calls that fill it.
    pub fn pack(&mut self, weight: Slot, parts: Vec<PackedPart>) {
        self.packed.insert(weight, parts);
    }

    /// Appends a call, after those that fill the packed weights it reads.
    pub fn call(&mut self, op: impl Into<Op>, reads: Vec<Slot>, writes: Vec<Slot>) {
        let packed = reads.iter().filter_map(|slot| self.packed.get(slot));
        let parts: Vec<PackedPart> = packed.flatten().copied().collect();
        for part in parts {
            let elements = self.slots.spec(part.weight).shape.elements();
            let math = self.math;
            self.calls.push(OpCall {
                op: Dequantise { elements, math }.into(),
                reads: vec![part.codes, part.maxima],
                writes: vec![part.weight],
            });
        }
        self.calls.push(OpCall {
            op: op.into(),
            reads,
            writes,
        });
    }
}
