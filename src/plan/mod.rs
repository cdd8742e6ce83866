//! The plan of a run: parameters placed in their arenas, and the programs over one layout.
//!
//! The order is: forward of the body; for each row chunk of the head its product, the cross-entropy
//! and at once their backward, so that only one chunk of logits exists; backward of the body; loss,
//! norm, clip, AdamW.

use std::collections::BTreeMap;

use crate::error::PlanError;
use crate::layout::{Layout, Region};
use crate::manifest::Manifest;
use crate::model::Model;
use crate::model::params::{Init, Training};
use crate::num::element::encode;
use crate::num::tree::TokenSum;
use crate::op::adamw::AdamW;
use crate::op::carry_state::CarryState;
use crate::op::clip::{Clip, GradSquares, LossScaling};
use crate::op::{OpCall, Slot};
use crate::program::{ProgramBuilder, SlotTable};
use crate::shape::{DType, Math, Role, Shape, TensorSpec};

mod backbone;
mod head;
pub mod memory;
mod place;

pub use backbone::{BackboneOutputs, Features};
use head::HeadPlan;

/// How sums over tokens are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenCut {
    /// Tokens of one grain.
    pub grain: usize,
    /// Tokens of one piece of a weight gradient, where the recipe sets it.
    pub piece: Option<usize>,
}

impl TokenCut {
    /// The cut of a sum over `rows` tokens; one chain a grain for `piece` of `None`.
    pub fn sum(&self, rows: usize, piece: Option<usize>) -> TokenSum {
        let grain = self.grain.min(rows).max(1);
        TokenSum {
            tokens: rows,
            grain,
            piece: piece.unwrap_or(grain).min(grain),
        }
    }
}

impl PlanConfig {
    /// How the run cuts its sums over tokens.
    pub fn cut(&self) -> TokenCut {
        TokenCut {
            grain: self.grain * self.seq_len,
            piece: self.piece_tokens,
        }
    }
}

/// The constants of a run that are baked into its program.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanConfig {
    pub batch: usize,
    pub seq_len: usize,
    /// Sequences of one grain.
    pub grain: usize,
    /// Tokens of one piece of a weight gradient; `None` for the default.
    pub piece_tokens: Option<usize>,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    /// The numeric domain: how products are computed.
    pub math: Math,
    /// Good steps after which the loss scale of f16 doubles.
    pub growth_interval: u32,
    /// The most logits that exist at once; decides memory, and for gradients whose pieces would be
    /// longer than a chunk the piece.
    pub chunk_logits: usize,
}

/// Good steps after which the loss scale of f16 doubles, where a recipe says nothing.
pub const GROWTH_INTERVAL: u32 = 2000;

/// Logits of one row chunk of the head: 1 GiB of f32.
pub const CHUNK_LOGITS: usize = 1 << 28;

impl PlanConfig {
    /// The defaults for batches of `batch` sequences of `seq_len` tokens: one grain, the betas of
    /// [`crate::engine::Hyper`], the f32 domain.
    pub fn of(batch: usize, seq_len: usize) -> Self {
        PlanConfig {
            batch,
            seq_len,
            grain: batch,
            piece_tokens: None,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            math: Math::F32,
            growth_interval: GROWTH_INTERVAL,
            chunk_logits: CHUNK_LOGITS,
        }
    }
}

/// A named parameter and where it lies.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    pub name: String,
    pub slot: Slot,
    /// The gradient and the two moments; `None` for a frozen parameter.
    pub state: Option<ParamState>,
    pub init: Init,
    pub training: Training,
    pub stored: Stored,
}

/// How a parameter lies in its slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stored {
    /// As f32.
    Plain,
    /// As NF4: the slot holds the codes.
    Packed {
        /// The block maxima, which are a parameter of their own.
        maxima: Slot,
        /// The shape of the weight.
        shape: Shape,
    },
    /// As f32, but it follows from the parameter before it: the block maxima of NF4.
    Maxima,
}

/// The slots AdamW keeps for a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamState {
    pub grad: Slot,
    pub moment1: Slot,
    pub moment2: Slot,
}

/// The slots of parameter groups, by name.
#[derive(Clone, Debug, Default)]
pub struct ParamSlots(BTreeMap<String, Slot>);

impl ParamSlots {
    /// The slot of a group.
    ///
    /// # Errors
    /// [`PlanError::NoGradient`] names a group that the model did not register.
    pub fn get(&self, name: &str) -> Result<Slot, PlanError> {
        self.0
            .get(name)
            .copied()
            .ok_or_else(|| PlanError::NoGradient {
                parameter: name.to_owned(),
            })
    }
}

/// What the caller writes before a step, and the derived tensors.
#[derive(Clone, Debug)]
pub struct StepInputs {
    pub batch: usize,
    pub seq_len: usize,
    /// Token ids, [batch, seq_len].
    pub ids: Slot,
    /// Targets, [batch, seq_len].
    pub targets: Slot,
    /// Loss weights, [batch, seq_len].
    pub weights: Slot,
    /// The per-step values.
    pub scalars: Slot,
    /// The loss scale, carried from step to step; `None` where gradients carry none.
    pub loss_scale: Option<Slot>,
    derived: BTreeMap<&'static str, Slot>,
    /// The recurrent state; `None` for models without one.
    pub carried: Option<Carried>,
    /// What the caller of a backbone alone writes; `None` for a model of tokens.
    pub features: Option<Features>,
}

/// The state that a step hands to the next one.
#[derive(Clone, Debug)]
pub struct Carried {
    /// Flags of the sequences that go on where their last window ended, `[batch]` u32; 0 begins anew.
    pub keep: Slot,
    /// All tensors of the state.
    pub state: Slot,
    /// The same tensors as the step leaves them; they become the state when the step is applied.
    pub next: Slot,
    /// Each tensor by name, now and next.
    pub tensors: BTreeMap<String, (Slot, Slot)>,
}

impl StepInputs {
    /// Tokens of the batch.
    pub fn rows(&self) -> usize {
        self.batch * self.seq_len
    }

    /// A tensor of the recurrent state, what it becomes, and the flags of the sequences that go on.
    ///
    /// # Errors
    /// [`PlanError::NoGradient`] names a tensor that the model did not declare.
    pub fn carried(&self, name: &str) -> Result<(Slot, Slot, Slot), PlanError> {
        let found = self.carried.as_ref().and_then(|carried| {
            let (state, next) = carried.tensors.get(name)?;
            Some((*state, *next, carried.keep))
        });
        found.ok_or_else(|| PlanError::NoGradient {
            parameter: name.to_owned(),
        })
    }

    /// The slot of a derived tensor.
    ///
    /// # Errors
    /// [`PlanError::NoGradient`] names a tensor that the model did not declare.
    pub fn derived(&self, name: &str) -> Result<Slot, PlanError> {
        self.derived
            .get(name)
            .copied()
            .ok_or_else(|| PlanError::NoGradient {
                parameter: name.to_owned(),
            })
    }
}

/// What a step leaves for the host.
#[derive(Clone, Copy, Debug)]
pub struct StepOutputs {
    pub row_loss: Slot,
    pub row_hit: Slot,
    pub loss: Slot,
    pub report: Slot,
}

/// The flat arenas of the trained parameters.
#[derive(Clone, Copy, Debug)]
pub struct ParamArenas {
    pub param: Slot,
    pub grad: Slot,
    pub moment1: Slot,
    pub moment2: Slot,
    /// The parameters as products read them, where those read a narrower type.
    pub shadow: Option<Slot>,
}

/// The programs over one layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ProgramKind {
    /// Forward, backward, clip and AdamW.
    Step,
    /// Forward and loss; changes nothing that survives.
    Evaluate,
}

/// Everything known about a run before it starts.
#[derive(Clone, Debug)]
pub struct Plan {
    pub slots: SlotTable,
    /// In parameter order: the order of the arenas.
    pub params: Vec<Param>,
    pub arenas: ParamArenas,
    pub inputs: StepInputs,
    pub outputs: StepOutputs,
    /// Host-computed tensors and their slots.
    pub derived: Vec<(Slot, Vec<f32>)>,
    /// Logits of each row chunk while the head runs: the slot and its first row.
    pub logits: Vec<(Slot, usize)>,
    pub config: PlanConfig,
    /// What a backbone alone leaves for its caller; `None` for a model of tokens.
    pub backbone: Option<BackboneOutputs>,
    /// Token ids and targets are below this.
    pub vocab_size: usize,
    pub layout: Layout,
    /// Parameter arenas and their shadows.
    shadows: Vec<(Slot, Slot)>,
    step: Vec<OpCall>,
    evaluate: Vec<OpCall>,
}

impl Plan {
    /// Plans the step of `model`.
    ///
    /// # Errors
    /// Sizes an op does not support; a parameter without a gradient; two parameters of one name.
    pub fn build(model: &dyn Model, config: PlanConfig) -> Result<Plan, PlanError> {
        let mut program = ProgramBuilder::of(config.math);
        let placed = place::parameters(&mut program, &model.parameters())?;
        let (inputs, derived) = place::inputs(&mut program, model, &config)?;
        let outputs = place::outputs(&mut program, inputs.rows());
        let body_head = model.forward(&mut program, &placed.groups, &inputs)?;
        let body = std::mem::take(&mut program.calls);
        let (mut logits, mut backbone) = (Vec::new(), None);
        let (evaluate, reached) = match inputs.features {
            Some(features) => {
                program.calls = body.clone();
                let (reached, left) = backbone::backward(
                    &mut program,
                    &body,
                    (features, body_head.hidden),
                    (placed.arenas, &config),
                )?;
                backbone = Some(left);
                (body, reached)
            }
            None => {
                let head = HeadPlan::declare(&mut program, body_head, (&inputs, outputs), &config)?;
                program.calls = body.clone();
                head.evaluate(&mut program);
                let evaluate = std::mem::take(&mut program.calls);
                program.calls = body.clone();
                logits = head.logits();
                (evaluate, head.step(&mut program, &body, placed.arenas)?)
            }
        };
        optimizer(&mut program, &placed, &config, (&inputs, outputs));
        let step = std::mem::take(&mut program.calls);
        check_reached(&program.slots, &placed.params, &reached)?;
        program.slots.check(&step)?;
        program.slots.check(&evaluate)?;
        let layout = Layout::plan(&program.slots, &[&step, &evaluate]);
        Ok(Plan {
            shadows: program.shadows(),
            slots: program.slots,
            params: placed.params,
            arenas: placed.arenas,
            inputs,
            outputs,
            derived,
            logits,
            backbone,
            vocab_size: body_head.vocab_size,
            config,
            layout,
            step,
            evaluate,
        })
    }

    /// The calls of a program.
    pub fn calls(&self, kind: ProgramKind) -> &[OpCall] {
        match kind {
            ProgramKind::Step => &self.step,
            ProgramKind::Evaluate => &self.evaluate,
        }
    }

    /// The manifest of the step.
    pub fn manifest(&self) -> Manifest {
        let domain = self.config.math.domain();
        Manifest::of(&self.slots, &self.layout, &self.step, domain)
    }

    /// Where the shadow of a parameter lies and what it holds for these values of the parameter;
    /// `None` where products read the parameters themselves.
    pub fn shadow_of(&self, param: Slot, values: &[f32]) -> Option<(Region, Vec<u8>)> {
        let (root, range) = self.slots.root(param);
        let (_, shadow) = self.shadows.iter().find(|(arena, _)| *arena == root)?;
        let storage = self.slots.spec(*shadow).dtype;
        let place = Region {
            offset: self.layout.region(*shadow).offset + range.start * storage.size(),
            bytes: range.len() * storage.size(),
        };
        Some((place, encode(storage, values)?))
    }

    /// The shape of a parameter, as files have it.
    pub fn shape_of<'a>(&'a self, param: &'a Param) -> &'a Shape {
        match &param.stored {
            Stored::Packed { shape, .. } => shape,
            _ => &self.slots.spec(param.slot).shape,
        }
    }

    /// Tokens of one step.
    pub fn tokens(&self) -> usize {
        self.inputs.rows()
    }

    /// Trained and frozen elements, padding apart.
    pub fn parameter_count(&self) -> usize {
        self.params
            .iter()
            .filter(|p| p.stored != Stored::Maxima)
            .map(|p| self.shape_of(p).elements())
            .sum()
    }

    /// Floating-point operations of a program, a multiply-add counted as two.
    pub fn flops(&self, kind: ProgramKind) -> u64 {
        self.calls(kind).iter().map(|c| c.op.rule().flops()).sum()
    }
}

/// The norm over the whole gradient arena, the clip decision, and one AdamW call.
fn optimizer(
    program: &mut ProgramBuilder,
    placed: &place::Placed,
    config: &PlanConfig,
    (inputs, outputs): (&StepInputs, StepOutputs),
) {
    let arenas = placed.arenas;
    let elements = program.slots.spec(arenas.param).shape.elements();
    let squares = GradSquares { elements };
    let partials = squares.partials();
    let spec = TensorSpec::new("grad_squares", [partials], DType::F64, Role::Scratch);
    let sums = program.slots.add(spec);
    program.call(squares, vec![arenas.grad], vec![sums]);
    let reads = vec![sums, outputs.loss, inputs.scalars];
    let loss_scaling = inputs.loss_scale.map(|_| LossScaling {
        growth_interval: config.growth_interval,
    });
    let clip = Clip {
        partials,
        loss_scaling,
    };
    let mut writes = vec![outputs.report];
    writes.extend(inputs.loss_scale);
    program.call(clip, reads, writes);
    let adamw = AdamW {
        elements,
        decayed: placed.decayed,
        beta1: config.beta1 as f32,
        one_minus_beta1: (1.0 - config.beta1) as f32,
        beta2: config.beta2 as f32,
        one_minus_beta2: (1.0 - config.beta2) as f32,
        eps: config.eps as f32,
        math: config.math,
    };
    let mut writes = vec![arenas.param, arenas.moment1, arenas.moment2];
    writes.extend(arenas.shadow);
    program.call(
        adamw,
        vec![arenas.grad, inputs.scalars, outputs.report],
        writes,
    );
    if let Some(carried) = &inputs.carried {
        let elements = program.slots.spec(carried.state).shape.elements();
        program.call(
            CarryState { elements },
            vec![carried.next, outputs.report],
            vec![carried.state],
        );
    }
}

fn check_reached(slots: &SlotTable, params: &[Param], reached: &[Slot]) -> Result<(), PlanError> {
    let missing = params
        .iter()
        .filter(|p| p.state.is_some())
        .find(|p| !reached.iter().any(|&r| slots.overlap(r, p.slot)));
    match missing {
        None => Ok(()),
        Some(p) => Err(PlanError::NoGradient {
            parameter: p.name.clone(),
        }),
    }
}

#[cfg(test)]
mod tests;
