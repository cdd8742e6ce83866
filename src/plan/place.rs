//! Places parameters, inputs and outputs in the slot table.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::backbone;
use super::{
    Carried, Param, ParamArenas, ParamSlots, ParamState, PlanConfig, StepInputs, StepOutputs,
    Stored,
};
use crate::error::PlanError;
use crate::model::Model;
use crate::model::params::{ParamGroup, ParamSpec, Reader, Training};
use crate::num::nf4::{BLOCK, blocks, packed_bytes};
use crate::op::Slot;
use crate::op::step_values::{LOSS_SCALE_WORDS, REPORT_WORDS, SCALAR_WORDS};
use crate::program::{PackedPart, ProgramBuilder};
use crate::shape::{DType, Role, Shape, TensorSpec};

/// A parameter group starts at a multiple of this many elements of its arena.
const GROUP_ALIGNMENT: usize = 64;

/// The parameters with their places.
pub struct Placed {
    /// In arena order.
    pub params: Vec<Param>,
    pub groups: ParamSlots,
    pub arenas: ParamArenas,
    /// Elements of the arenas to which weight decay applies; they come first.
    pub decayed: usize,
}

/// Decayed groups first, then the others: the decay of an element follows from its place.
pub fn parameters(
    program: &mut ProgramBuilder,
    groups: &[ParamGroup],
) -> Result<Placed, PlanError> {
    let mut names = BTreeSet::new();
    for tensor in groups.iter().flat_map(|g| &g.tensors) {
        if !names.insert(tensor.name.as_str()) {
            return Err(PlanError::DuplicateParameter {
                parameter: tensor.name.clone(),
            });
        }
    }
    let of = |training: Training| groups.iter().filter(move |g| g.training == training);
    let size = |training| size_of(groups, training);
    let decayed = size(Training::Decayed);
    let trained = decayed + size(Training::Undecayed);
    let mut arena = |name: &str, role| {
        let spec = TensorSpec::new(name, [trained], DType::F32, role);
        program.slots.add(spec)
    };
    let mut arenas = ParamArenas {
        param: arena("param", Role::Param),
        grad: arena("grad", Role::Grad),
        moment1: arena("moment1", Role::Moment1),
        moment2: arena("moment2", Role::Moment2),
        shadow: None,
    };
    let trained_groups = || of(Training::Decayed).chain(of(Training::Undecayed));
    let shadowed = product_elements(trained_groups());
    arenas.shadow = program.shadow_arena(arenas.param, "shadow", shadowed);
    let frozen_elements = size(Training::Frozen);
    let frozen = (frozen_elements > 0).then(|| {
        let spec = TensorSpec::new("frozen", [frozen_elements], DType::F32, Role::Frozen);
        program.slots.add(spec)
    });
    let mut params = Vec::new();
    let mut slots = ParamSlots::default();
    place_groups(
        program,
        trained_groups(),
        (arenas.param, Some(arenas)),
        (&mut params, &mut slots),
    )?;
    if let Some(root) = frozen {
        place_groups(
            program,
            of(Training::Frozen),
            (root, None),
            (&mut params, &mut slots),
        )?;
    }
    place_products(program, groups, (&mut params, &mut slots))?;
    let packed = groups
        .iter()
        .filter(|g| matches!(g.training, Training::Packed(_)));
    let packed: Vec<&ParamGroup> = packed.collect();
    place_packed(program, &packed, (&mut params, &mut slots))?;
    Ok(Placed {
        params,
        groups: slots,
        arenas,
        decayed,
    })
}

fn place_groups<'g>(
    program: &mut ProgramBuilder,
    groups: impl Iterator<Item = &'g ParamGroup>,
    (root, arenas): (Slot, Option<ParamArenas>),
    (params, slots): (&mut Vec<Param>, &mut ParamSlots),
) -> Result<(), PlanError> {
    let mut start = 0;
    for group in groups {
        let whole = program
            .slots
            .view(root, start, &group.name, group.shape())?;
        slots.0.insert(group.name.clone(), whole);
        let mut at = start;
        for tensor in &group.tensors {
            let mut view = |root: Slot, prefix: &str| {
                let name = format!("{prefix}{}", tensor.name);
                program.slots.view(root, at, name, tensor.shape.clone())
            };
            let slot = match group.tensors.len() {
                1 => whole,
                _ => view(root, "")?,
            };
            let state = match arenas {
                None => None,
                Some(a) => Some(ParamState {
                    grad: view(a.grad, "grad.")?,
                    moment1: view(a.moment1, "moment1.")?,
                    moment2: view(a.moment2, "moment2.")?,
                }),
            };
            params.push(Param {
                name: tensor.name.clone(),
                slot,
                state,
                init: tensor.init,
                training: group.training,
                stored: Stored::Plain,
            });
            at += tensor.shape.elements();
        }
        start += group.elements().next_multiple_of(GROUP_ALIGNMENT);
    }
    Ok(())
}

/// From the first element of these groups that a product reads to behind the last one.
fn product_elements<'g>(groups: impl Iterator<Item = &'g ParamGroup>) -> Range<usize> {
    let (mut start, mut run) = (0, 0..0);
    for group in groups {
        let end = start + group.elements().next_multiple_of(GROUP_ALIGNMENT);
        if group.reader == Reader::Products {
            run = if run.is_empty() { start } else { run.start }..end;
        }
        start = end;
    }
    run
}

/// Elements of all groups of a kind, each padded to where the next may start.
fn size_of(groups: &[ParamGroup], training: Training) -> usize {
    let groups = groups.iter().filter(|g| g.training == training);
    groups
        .map(|g| g.elements().next_multiple_of(GROUP_ALIGNMENT))
        .sum()
}

/// Frozen weights that products alone read, stored as they read them.
fn place_products(
    program: &mut ProgramBuilder,
    groups: &[ParamGroup],
    targets: (&mut Vec<Param>, &mut ParamSlots),
) -> Result<(), PlanError> {
    let kind = Training::FrozenProduct;
    let elements = size_of(groups, kind);
    if elements == 0 {
        return Ok(());
    }
    let storage = program.math.storage();
    let spec = TensorSpec::new("frozen_products", [elements], storage, Role::Frozen);
    let root = program.slots.add(spec);
    let groups = groups.iter().filter(|g| g.training == kind);
    place_groups(program, groups, (root, None), targets)
}

/// Codes and block maxima of each tensor, and one scratch for the numbers of any one group.
fn place_packed(
    program: &mut ProgramBuilder,
    groups: &[&ParamGroup],
    (params, slots): (&mut Vec<Param>, &mut ParamSlots),
) -> Result<(), PlanError> {
    let Some(most) = groups.iter().map(|g| g.elements()).max() else {
        return Ok(());
    };
    let storage = program.math.storage();
    let spec = TensorSpec::new("dequantised", [most], storage, Role::Scratch);
    let scratch = program.slots.add(spec);
    for group in groups {
        let whole = program.slots.view(scratch, 0, &group.name, group.shape())?;
        slots.0.insert(group.name.clone(), whole);
        let stored = codes_of(program, group)?;
        let parts = match stored.whole {
            Some((codes, maxima)) => vec![PackedPart {
                codes,
                maxima,
                weight: whole,
            }],
            None => parts_of(program, group, (scratch, &stored.tensors))?,
        };
        program.pack(whole, parts);
        for (tensor, &(codes, maxima)) in group.tensors.iter().zip(&stored.tensors) {
            let shape = tensor.shape.clone();
            let kinds = [Stored::Packed { maxima, shape }, Stored::Maxima];
            let names = [
                (tensor.name.clone(), codes),
                (maxima_name(&tensor.name), maxima),
            ];
            for ((name, slot), stored) in names.into_iter().zip(kinds) {
                params.push(Param {
                    name,
                    slot,
                    state: None,
                    init: tensor.init,
                    training: group.training,
                    stored,
                });
            }
        }
    }
    Ok(())
}

fn maxima_name(tensor: &str) -> String {
    format!("{tensor}.absmax")
}

/// Where the codes and maxima of a group lie.
struct GroupCodes {
    /// Of the group as one tensor, where they are those of its tensors one after another.
    whole: Option<(Slot, Slot)>,
    /// Of each tensor.
    tensors: Vec<(Slot, Slot)>,
}

/// Places codes and maxima. Tensors of whole blocks lie one after another, so that one call turns the whole
/// group into numbers.
fn codes_of(program: &mut ProgramBuilder, group: &ParamGroup) -> Result<GroupCodes, PlanError> {
    let mut place = |name: &str, elements: usize| {
        let mut add = |name: String, count, dtype| {
            let spec = TensorSpec::new(name, [count], dtype, Role::Frozen);
            program.slots.add(spec)
        };
        (
            add(name.to_owned(), packed_bytes(elements), DType::U8),
            add(maxima_name(name), blocks(elements), DType::F32),
        )
    };
    let whole_blocks = |t: &ParamSpec| t.shape.elements().is_multiple_of(BLOCK);
    if group.tensors.len() < 2 || !group.tensors.iter().all(whole_blocks) {
        let tensors = group.tensors.iter();
        return Ok(GroupCodes {
            whole: None,
            tensors: tensors
                .map(|t| place(&t.name, t.shape.elements()))
                .collect(),
        });
    }
    let (codes, maxima) = place(&format!("packed.{}", group.name), group.elements());
    let (mut tensors, mut start) = (Vec::new(), 0);
    for tensor in &group.tensors {
        let elements = tensor.shape.elements();
        let mut view = |root, at, name: String, count: usize| {
            let shape = Shape::from([count]);
            program.slots.view(root, at, name, shape)
        };
        let bytes = packed_bytes(elements);
        tensors.push((
            view(codes, packed_bytes(start), tensor.name.clone(), bytes)?,
            view(
                maxima,
                blocks(start),
                maxima_name(&tensor.name),
                blocks(elements),
            )?,
        ));
        start += elements;
    }
    Ok(GroupCodes {
        whole: Some((codes, maxima)),
        tensors,
    })
}

/// The place of each tensor's numbers in the scratch.
fn parts_of(
    program: &mut ProgramBuilder,
    group: &ParamGroup,
    (scratch, stored): (Slot, &[(Slot, Slot)]),
) -> Result<Vec<PackedPart>, PlanError> {
    let (mut parts, mut start) = (Vec::new(), 0);
    for (tensor, &(codes, maxima)) in group.tensors.iter().zip(stored) {
        let name = format!("dequantised.{}", tensor.name);
        let shape = tensor.shape.clone();
        let weight = program.slots.view(scratch, start, name, shape)?;
        start += tensor.shape.elements();
        parts.push(PackedPart {
            codes,
            maxima,
            weight,
        });
    }
    Ok(parts)
}

/// The derived tensors and what they hold.
type DerivedValues = Vec<(Slot, Vec<f32>)>;

/// Declares the inputs of a step and the derived tensors with their values.
pub fn inputs(
    program: &mut ProgramBuilder,
    model: &dyn Model,
    config: &PlanConfig,
) -> Result<(StepInputs, DerivedValues), PlanError> {
    let batch = config.pass_sequences();
    let tokens = Shape::from([batch, config.seq_len]);
    let mut add = |name: &str, shape: Shape, dtype, role| {
        program.slots.add(TensorSpec::new(name, shape, dtype, role))
    };
    let mut inputs = StepInputs {
        batch,
        seq_len: config.seq_len,
        ids: add("input_ids", tokens.clone(), DType::I32, Role::Input),
        targets: add("targets", tokens.clone(), DType::I32, Role::Input),
        weights: add("weights", tokens, DType::F32, Role::Input),
        scalars: add("scalars", [SCALAR_WORDS].into(), DType::F32, Role::Scalars),
        loss_scale: None,
        derived: BTreeMap::new(),
        carried: None,
        features: None,
    };
    if config.math.scales_loss() {
        let words = Shape::from([LOSS_SCALE_WORDS]);
        inputs.loss_scale = Some(add("loss_scale", words, DType::U32, Role::Carried));
    }
    let mut tensors = Vec::new();
    for derived in model.derived(config.seq_len)? {
        let shape = Shape::new(derived.shape);
        let slot = add(derived.name, shape, DType::F32, Role::Derived);
        inputs.derived.insert(derived.name, slot);
        tensors.push((slot, derived.values));
    }
    if let Some(width) = model.features() {
        inputs.features = Some(backbone::declare(program, inputs.rows(), width));
    }
    inputs.carried = carried(program, model, batch)?;
    Ok((inputs, tensors))
}

/// Declares the state that a step hands to the next one: all of it in one slot, and what the step makes of it
/// in another.
fn carried(
    program: &mut ProgramBuilder,
    model: &dyn Model,
    batch: usize,
) -> Result<Option<Carried>, PlanError> {
    let tensors = model.carried(batch);
    if tensors.is_empty() {
        return Ok(None);
    }
    let elements = tensors.iter().map(|t| t.shape.elements()).sum();
    let mut add = |name: &str, elements: usize, dtype, role| {
        let spec = TensorSpec::new(name, [elements], dtype, role);
        program.slots.add(spec)
    };
    let keep = add("keep", batch, DType::U32, Role::Input);
    let state = add("state", elements, DType::F32, Role::Carried);
    let next = add("state_next", elements, DType::F32, Role::Activation);
    let mut places = BTreeMap::new();
    let mut start = 0;
    for tensor in tensors {
        let mut view = |parent, prefix: &str| {
            let name = format!("{prefix}{}", tensor.name);
            program
                .slots
                .view(parent, start, name, tensor.shape.clone())
        };
        let pair = (view(state, "")?, view(next, "next.")?);
        start += tensor.shape.elements();
        places.insert(tensor.name, pair);
    }
    Ok(Some(Carried {
        keep,
        state,
        next,
        tensors: places,
    }))
}

/// Declares what a step leaves for the host.
pub fn outputs(program: &mut ProgramBuilder, rows: usize) -> StepOutputs {
    let mut add = |name: &str, elements: usize, dtype| {
        let spec = TensorSpec::new(name, [elements], dtype, Role::Report);
        program.slots.add(spec)
    };
    StepOutputs {
        row_loss: add("row_loss", rows, DType::F32),
        row_hit: add("row_hit", rows, DType::U32),
        loss: add("loss", 1, DType::F32),
        report: add("report", REPORT_WORDS, DType::U32),
    }
}
