//! Low-rank adapters on the linear projections of a decoder: which, how large, and their calls.

use super::decoder::{EMBED, LM_HEAD};
use super::params::{Init, ParamGroup, ParamSpec, Training};
use crate::error::PlanError;
use crate::num::nf4::Quantisation;
use crate::op::Slot;
use crate::op::lora::{Adapters, LoraDown, LoraUp, Part};
use crate::op::matmul::Matmul;
use crate::plan::ParamSlots;
use crate::program::ProgramBuilder;

/// What PEFT puts before the names of a model's own tensors.
pub const PEFT_PREFIX: &str = "base_model.model.";

/// A linear projection of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Projection {
    Query,
    Key,
    Value,
    Output,
    Gate,
    Up,
    Down,
}

impl Projection {
    /// Every projection.
    pub const ALL: [Projection; 7] = [
        Projection::Query,
        Projection::Key,
        Projection::Value,
        Projection::Output,
        Projection::Gate,
        Projection::Up,
        Projection::Down,
    ];

    /// The module's name in model folders.
    pub const fn module(self) -> &'static str {
        match self {
            Projection::Query => "q_proj",
            Projection::Key => "k_proj",
            Projection::Value => "v_proj",
            Projection::Output => "o_proj",
            Projection::Gate => "gate_proj",
            Projection::Up => "up_proj",
            Projection::Down => "down_proj",
        }
    }

    /// The projection whose module has this name.
    pub fn of_module(name: &str) -> Option<Projection> {
        Projection::ALL.into_iter().find(|p| p.module() == name)
    }
}

/// Whether the norms' weights are trained beside the adapters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Norms {
    /// They stay as the base has them.
    #[default]
    Frozen,
    Trained,
}

/// The adapters of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    pub rank: usize,
    /// The adapters' sum is multiplied by `alpha / rank`.
    pub alpha: f64,
    pub targets: Vec<Projection>,
    pub norms: Norms,
    pub base: Base,
}

/// How the projections of the frozen base are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Base {
    /// As the model's own parameters.
    #[default]
    Plain,
    /// As NF4, quantised once when they are loaded.
    Nf4(Quantisation),
}

/// A product of one or several projections of the same input.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    /// The module that holds the projections, as `model.layers.0.mlp`.
    pub module: String,
    /// The projections, with their columns, in the order of the product's columns.
    pub members: Vec<(Projection, usize)>,
    pub n_in: usize,
}

impl Linear {
    /// Columns of the whole product.
    pub fn n_out(&self) -> usize {
        self.members.iter().map(|m| m.1).sum()
    }

    /// The name of the group of all `A` or all `B`.
    fn group(&self, which: &str) -> String {
        let names = self.members.iter().map(|(p, _)| p.module());
        let names: Vec<&str> = names.collect();
        format!("{}.{}.{which}", self.module, names.join("_"))
    }

    /// Emits the product into `y`, `reads` being input, weight and perhaps bias, between the two calls
    /// of its adapters. The calls stand in this order so that the gradient of the input is first
    /// assigned by the product and then added to by the adapters.
    ///
    /// # Errors
    /// A rank above a dimension; adapters that were not placed.
    pub fn emit(
        &self,
        program: &mut ProgramBuilder,
        params: &ParamSlots,
        lora: Option<&LoraConfig>,
        (reads, y): (Vec<Slot>, Slot),
    ) -> Result<(), PlanError> {
        let (n_in, n_out, math) = (self.n_in, self.n_out(), program.math);
        let rows = program.slots.spec(y).shape.elements() / n_out.max(1);
        let adapters = lora.map(|lora| lora.adapters(self)).transpose()?.flatten();
        let mut low = None;
        if let Some(adapters) = &adapters {
            let ranks = adapters.ranks();
            let a = program.product_operand(params.get(&self.group("lora_A"))?)?;
            let s = program.narrow_activation(self.group("lora_s"), [rows, ranks]);
            let op = LoraDown {
                rows,
                n_in,
                ranks,
                math,
            };
            program.call(op, vec![reads[0], a], vec![s]);
            low = Some(s);
        }
        let product = Matmul {
            rows,
            n_in,
            n_out,
            bias: reads.len() > 2,
            math,
        };
        program.call(product, reads, vec![y]);
        if let (Some(adapters), Some(s)) = (adapters, low) {
            let b = program.product_operand(params.get(&self.group("lora_B"))?)?;
            let op = LoraUp {
                rows,
                adapters,
                math,
            };
            program.call(op, vec![s, b], vec![y]);
        }
        Ok(())
    }
}

impl LoraConfig {
    /// `alpha / rank`, rounded once.
    pub fn scale(&self) -> f32 {
        (self.alpha / self.rank as f64) as f32
    }

    /// Whether a group of the base is trained beside the adapters, and how.
    pub fn training_of(&self, group: &ParamGroup) -> Training {
        if self.norms == Norms::Trained && group.name.ends_with("norm.weight") {
            return Training::Undecayed;
        }
        let projection = group.name.ends_with("proj.weight");
        match self.base {
            Base::Nf4(how) if projection => Training::Packed(how),
            Base::Plain if projection => Training::FrozenProduct,
            _ if [EMBED, LM_HEAD].contains(&group.name.as_str()) => Training::FrozenProduct,
            _ => Training::Frozen,
        }
    }

    /// The adapters of a product; `None` when none of its projections has one.
    ///
    /// # Errors
    /// [`PlanError::Size`] for a rank that is 0 or above a dimension of a projection.
    fn adapters(&self, linear: &Linear) -> Result<Option<Adapters>, PlanError> {
        let mut first = 0;
        let mut parts = Vec::new();
        for &(projection, columns) in &linear.members {
            if self.targets.contains(&projection) {
                if self.rank == 0 || self.rank > linear.n_in.min(columns) {
                    return Err(PlanError::Size {
                        what: "lora.rank",
                        expected: "1 to the smaller dimension of every adapted projection",
                        found: self.rank,
                    });
                }
                parts.push(Part { first, columns });
            }
            first += columns;
        }
        Ok((!parts.is_empty()).then(|| Adapters {
            rank: self.rank,
            n_out: linear.n_out(),
            parts,
            scale: self.scale(),
        }))
    }

    /// The adapters' parameters: `A` uniform within `1 / √n_in`, which is PEFT's Kaiming
    /// initialisation with a = √5, and `B` zero. Their names are PEFT's.
    pub fn parameters(&self, linear: &Linear) -> Vec<ParamGroup> {
        let members = linear.members.iter();
        let adapted: Vec<_> = members.filter(|m| self.targets.contains(&m.0)).collect();
        if adapted.is_empty() {
            return Vec::new();
        }
        let name = |projection: Projection, which: &str| {
            let module = projection.module();
            format!("{PEFT_PREFIX}{}.{module}.{which}.weight", linear.module)
        };
        let bound = (1.0 / (linear.n_in as f64).sqrt()) as f32;
        let down = adapted.iter().map(|(p, _)| ParamSpec {
            name: name(*p, "lora_A"),
            shape: [self.rank, linear.n_in].into(),
            init: Init::Uniform { bound },
        });
        let up = adapted.iter().map(|(p, columns)| ParamSpec {
            name: name(*p, "lora_B"),
            shape: [*columns, self.rank].into(),
            init: Init::Zeros,
        });
        vec![
            ParamGroup::fused(linear.group("lora_A"), down.collect()),
            ParamGroup::fused(linear.group("lora_B"), up.collect()),
        ]
    }
}

#[cfg(test)]
#[path = "lora_tests.rs"]
mod tests;
