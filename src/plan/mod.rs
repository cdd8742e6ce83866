//! The plan of a run: parameters placed in their arenas, and the programs over one layout.
//!
//! The order is: forward of the body; for each row chunk of the head its product, the cross-entropy
//! and at once their backward, so that only one chunk of logits exists; backward of the body; loss,
//! norm, clip, AdamW.

use std::collections::BTreeMap;

use crate::error::PlanError;
use crate::grad::recompute::Repeated;
use crate::layout::{Layout, Region};
use crate::manifest::Manifest;
use crate::model::Model;
use crate::model::params::{Init, Training};
use crate::num::element::encode;
use crate::num::tree::TokenSum;
use crate::op::{OpCall, Slot};
use crate::program::{Shadow, SlotTable};
use crate::shape::{Math, Shape};

mod again;
mod backbone;
mod budget;
mod build;
mod cost;
mod form;
mod head;
pub mod memory;
mod optimizer;
mod place;
mod programs;
mod window;

pub use again::ComputedAgain;
pub use backbone::{BackboneOutputs, Features};
pub use form::{Passes, Recompute, StepForm};
pub use programs::{ProgramKind, Programs};
pub use window::{WindowLevel, WindowSlots};

use build::Chosen;

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
    /// Elements from which on the output of SwiGLU is written again by backward and not kept for it; decides memory
    /// and no bit.
    pub restored_elements: usize,
    /// How the step is carried out; decides no bit.
    pub form: StepForm,
}

/// Good steps after which the loss scale of f16 doubles, where a recipe says nothing.
pub const GROWTH_INTERVAL: u32 = 2000;

/// Logits of one row chunk of the head: 1.5 GiB of f32, 768 MiB of narrow ones. It lets 2,048 rows of a vocabulary of 151,936
/// be a chunk, which fill a large device.
pub const CHUNK_LOGITS: usize = 3 << 27;

/// Elements from which on the output of SwiGLU is written again by backward. The weight gradient of the product that
/// reads it then stands after SwiGLU's backward; of a smaller layer it stays beside the input gradient, with which a
/// device may compute it in one launch.
pub const RESTORED_ELEMENTS: usize = 1 << 22;

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
            restored_elements: RESTORED_ELEMENTS,
            form: StepForm::default(),
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
    pub shadow: Option<Shadow>,
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
    shadows: Vec<(Slot, Shadow)>,
    programs: Programs,
    /// What passes are accumulated in; `None` where the plan has one program a step.
    pub window: Option<WindowSlots>,
    /// What forward leaves for the caller to compute a loss from; `None` unless the step comes in halves.
    pub output: Option<HalfOutput>,
    /// The calls of its step, or of a pass of it, that backward computes again.
    repeated: Vec<Repeated>,
    /// The hash of the manifest in the form that defines the bits.
    definition: blake3::Hash,
}

/// What the forward half leaves, in the storage of products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HalfOutput {
    /// `[batch · seq_len, width]`: logits of a model of tokens, features of a backbone.
    pub output: Slot,
    /// Where the backward half reads the gradient; with the loss scale where gradients carry one.
    pub gradient: Slot,
    /// The gradient of a backbone's features in, f32, that the backward half leaves.
    pub input_grad: Option<Slot>,
    pub width: usize,
}

impl Plan {
    /// Plans the step of `model`.
    ///
    /// # Errors
    /// Sizes an op does not support; a parameter without a gradient; two parameters of one name; a form that
    /// model or batch do not allow; a budget that the arena cannot keep.
    pub fn build(model: &dyn Model, config: PlanConfig) -> Result<Plan, PlanError> {
        config.check_form()?;
        let definition = match config.form.is_defining() {
            true => None,
            false => Some(Plan::build(model, config.defining())?.definition),
        };
        let layers = match config.form.recompute {
            Recompute::Nothing => None,
            Recompute::Layers(layers) => Some(layers),
            Recompute::Within { arena_bytes } => {
                return budget::plan(model, &config, definition, arena_bytes);
            }
        };
        Ok(build::plan(model, config, definition, Chosen::Layers(layers))?.plan)
    }

    /// The calls of a program; none where the plan has no such program.
    pub fn calls(&self, kind: ProgramKind) -> &[OpCall] {
        self.programs.calls(kind)
    }

    /// Every program, in the order in which they are captured.
    pub fn programs(&self) -> &Programs {
        &self.programs
    }

    /// The manifest of the plan's programs.
    pub fn manifest(&self) -> Manifest {
        let domain = self.config.math.domain();
        let step = self.calls(ProgramKind::Step);
        // An evaluation computes no bit of training.
        let others = self
            .programs
            .iter()
            .filter(|(kind, _)| !matches!(kind, ProgramKind::Step | ProgramKind::Evaluate));
        let others: Vec<_> = others
            .map(|(kind, calls)| (kind.to_string(), calls))
            .collect();
        Manifest::of(&self.slots, &self.layout, step, domain).with_programs(&others)
    }

    /// The hash of the manifest of the step as one program over its whole batch with all activations kept: what
    /// defines the bits, whatever form the step is carried out in.
    pub fn definition(&self) -> blake3::Hash {
        self.definition
    }

    /// Where the shadow of a parameter lies and what it holds for these values of the parameter;
    /// `None` where products read the parameters themselves, or do not read this one.
    pub fn shadow_of(&self, param: Slot, values: &[f32]) -> Option<(Region, Vec<u8>)> {
        let (root, range) = self.slots.root(param);
        let (_, shadow) = self.shadows.iter().find(|(arena, _)| *arena == root)?;
        let spec = self.slots.spec(shadow.slot);
        let (storage, shadowed) = (spec.dtype, spec.shape.elements());
        let start = range.start.checked_sub(shadow.first)?;
        if start + range.len() > shadowed {
            return None;
        }
        let place = Region {
            offset: self.layout.region(shadow.slot).offset + start * storage.size(),
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
        self.config.batch * self.config.seq_len
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

    /// Floating-point operations of one step, a multiply-add counted as two.
    pub fn step_flops(&self) -> u64 {
        let passes = self.config.passes() as u64;
        match self.config.is_split() {
            true => passes * self.flops(ProgramKind::Accumulate) + self.flops(ProgramKind::Apply),
            false => self.flops(ProgramKind::Step),
        }
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
