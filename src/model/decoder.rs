//! The decoder-only transformers: Llama, Qwen2 (query, key and value biases) and Qwen3 (per-head norms
//! of queries and keys).
//!
//! A layer is: residual + norm, one product for queries, keys and values, rotary (with the head norms),
//! attention, output product, residual + norm, one product for gate and up, SwiGLU, down product. The
//! residual addition of a sublayer is part of the next norm.

use super::config::{Family, ModelConfig};
use super::lora::{Linear, LoraConfig, Projection};
use super::params::{Init, ParamGroup, ParamSpec};
use super::stream::{Norm, Stream};
use super::{Derived, Head, Model};
use crate::error::PlanError;
use crate::num;
use crate::op::attention::{Attention, AttentionShape};
use crate::op::embed::{Embed, EmbedFrozen};
use crate::op::rope::{Heads, QkNormRope, Rope};
use crate::op::swiglu::SwiGlu;
use crate::op::{Op, Slot};
use crate::plan::{ParamSlots, StepInputs};
use crate::program::ProgramBuilder;
use crate::shape::{DType, Math};

/// Elements of the largest head: one lane each in a head's reductions.
pub const MAX_HEAD_DIM: usize = 256;

pub(super) const EMBED: &str = "model.embed_tokens.weight";
const FINAL_NORM: &str = "model.norm.weight";
pub(super) const LM_HEAD: &str = "lm_head.weight";
const ROPE_TABLE: &str = "rope_table";

/// A transformer of one of the families in [`Family`].
#[derive(Clone, Debug)]
pub struct Decoder {
    config: ModelConfig,
    lora: Option<LoraConfig>,
}

impl Decoder {
    /// The model of a configuration.
    pub fn new(config: ModelConfig) -> Self {
        Decoder { config, lora: None }
    }

    /// The model with everything frozen but adapters, and norms where they are trained too.
    pub fn with_adapters(config: ModelConfig, lora: LoraConfig) -> Self {
        let lora = Some(lora);
        Decoder { config, lora }
    }

    /// The products of a layer: queries, keys and values; output; gate and up; down.
    fn linears(&self, layer: usize) -> [Linear; 4] {
        use Projection::{Down, Gate, Key, Output, Query, Up, Value};
        let c = &self.config;
        let (queries, keys) = (c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim);
        let linear = |module: &str, members: &[(Projection, usize)], n_in| Linear {
            module: format!("model.layers.{layer}.{module}"),
            members: members.to_vec(),
            n_in,
        };
        let qkv = [(Query, queries), (Key, keys), (Value, keys)];
        [
            linear("self_attn", &qkv, c.d_model),
            linear("self_attn", &[(Output, c.d_model)], queries),
            linear("mlp", &[(Gate, c.d_ff), (Up, c.d_ff)], c.d_model),
            linear("mlp", &[(Down, c.d_model)], c.d_ff),
        ]
    }

    fn heads(&self) -> Heads {
        Heads {
            n_heads: self.config.n_heads,
            n_kv_heads: self.config.n_kv_heads,
            head_dim: self.config.head_dim,
        }
    }

    fn matrix(&self, name: String, rows: usize, columns: usize) -> ParamSpec {
        ParamSpec {
            name,
            shape: [rows, columns].into(),
            init: Init::Normal {
                std: self.config.init_std as f32,
            },
        }
    }

    fn layer_parameters(&self, layer: usize, groups: &mut Vec<ParamGroup>) {
        let c = &self.config;
        let (d, head) = (c.d_model, c.head_dim);
        let name = |suffix: &str| format!("model.layers.{layer}.{suffix}");
        let sizes = [("q", c.n_heads), ("k", c.n_kv_heads), ("v", c.n_kv_heads)];
        let projections = sizes.map(|(which, heads)| {
            self.matrix(
                name(&format!("self_attn.{which}_proj.weight")),
                heads * head,
                d,
            )
        });
        groups.push(ParamGroup::fused(
            name("self_attn.qkv_proj.weight"),
            projections.into(),
        ));
        if c.family == Family::Qwen2 {
            let biases = sizes.map(|(which, heads)| ParamSpec {
                name: name(&format!("self_attn.{which}_proj.bias")),
                shape: [heads * head].into(),
                init: Init::Zeros,
            });
            groups.push(ParamGroup::fused(
                name("self_attn.qkv_proj.bias"),
                biases.into(),
            ));
        }
        if c.family == Family::Qwen3 {
            for which in ["q", "k"] {
                let norm = name(&format!("self_attn.{which}_norm.weight"));
                groups.push(ParamGroup::single(norm, [head], Init::Ones));
            }
        }
        let square = |suffix: &str, rows, columns| {
            let spec = self.matrix(name(suffix), rows, columns);
            ParamGroup::single(spec.name, spec.shape, spec.init)
        };
        groups.push(square("self_attn.o_proj.weight", d, c.n_heads * head));
        let gate_up = ["gate", "up"]
            .map(|which| self.matrix(name(&format!("mlp.{which}_proj.weight")), c.d_ff, d));
        groups.push(ParamGroup::fused(
            name("mlp.gate_up_proj.weight"),
            gate_up.into(),
        ));
        groups.push(square("mlp.down_proj.weight", d, c.d_ff));
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            let norm = name(&format!("{norm}.weight"));
            groups.push(ParamGroup::single(norm, [d], Init::Ones));
        }
    }

    /// The embedding; beside adapters its table is frozen and stored as the head reads it.
    fn embed(&self, rows: usize, math: Math) -> Op {
        let (vocab_size, d_model) = (self.config.vocab_size, self.config.d_model);
        if self.lora.is_none() || math.storage() == DType::F32 {
            let op = Embed {
                rows,
                vocab_size,
                d_model,
            };
            return op.into();
        }
        let op = EmbedFrozen {
            rows,
            vocab_size,
            d_model,
            math,
        };
        op.into()
    }

    fn norm(
        &self,
        program: &mut ProgramBuilder,
        stream: &mut Stream,
        weight: Slot,
        name: &str,
        rows: usize,
    ) -> Slot {
        let norm = Norm {
            weight,
            name,
            rows,
            d_model: self.config.d_model,
            eps: self.config.rms_norm_eps,
        };
        stream.norm(program, &norm)
    }

    fn attention(
        &self,
        program: &mut ProgramBuilder,
        params: &ParamSlots,
        inputs: &StepInputs,
        (layer, h): (usize, Slot),
    ) -> Result<Slot, PlanError> {
        let c = &self.config;
        let (rows, heads) = (inputs.rows(), self.heads());
        let weight = |suffix: &str| params.get(&format!("model.layers.{layer}.self_attn.{suffix}"));
        let local = |what: &str| format!("layers.{layer}.{what}");
        let mut reads = vec![h, program.product_operand(weight("qkv_proj.weight")?)?];
        if c.family == Family::Qwen2 {
            reads.push(weight("qkv_proj.bias")?);
        }
        let mut qkv = program.narrow_activation(local("qkv"), [rows, heads.columns()]);
        let [fused, output, ..] = self.linears(layer);
        fused.emit(program, params, self.lora.as_ref(), (reads, qkv))?;
        qkv = self.rotate(program, params, inputs, (layer, qkv))?;
        let o = program.narrow_activation(local("attention"), [rows, heads.query_columns()]);
        let lse = program.activation(local("lse"), [rows, heads.n_heads]);
        let shape = AttentionShape {
            batch: inputs.batch,
            seq_len: inputs.seq_len,
            heads,
        };
        let math = program.math;
        program.call(Attention { shape, math }, vec![qkv], vec![o, lse]);
        let y = program.narrow_activation(local("attention_out"), [rows, c.d_model]);
        let projection = program.product_operand(weight("o_proj.weight")?)?;
        let operands = (vec![o, projection], y);
        output.emit(program, params, self.lora.as_ref(), operands)?;
        Ok(y)
    }

    /// Positions for queries and keys, with the head norms where the family has them.
    fn rotate(
        &self,
        program: &mut ProgramBuilder,
        params: &ParamSlots,
        inputs: &StepInputs,
        (layer, qkv): (usize, Slot),
    ) -> Result<Slot, PlanError> {
        let c = &self.config;
        let (rows, heads, seq_len) = (inputs.rows(), self.heads(), inputs.seq_len);
        let table = inputs.derived(ROPE_TABLE)?;
        if c.family != Family::Qwen3 {
            let op = Rope {
                rows,
                seq_len,
                heads,
                math: program.math,
            };
            program.call(op, vec![table], vec![qkv]);
            return Ok(qkv);
        }
        let weight = |suffix: &str| params.get(&format!("model.layers.{layer}.self_attn.{suffix}"));
        let local = |what: &str| format!("layers.{layer}.{what}");
        let rotated = program.narrow_activation(local("qkv_rotated"), [rows, heads.columns()]);
        let rstd = program.activation(local("qk_rstd"), [rows, heads.rotated()]);
        let op = QkNormRope {
            rows,
            seq_len,
            heads,
            eps: c.rms_norm_eps as f32,
            math: program.math,
        };
        let reads = vec![
            qkv,
            weight("q_norm.weight")?,
            weight("k_norm.weight")?,
            table,
        ];
        program.call(op, reads, vec![rotated, rstd]);
        Ok(rotated)
    }

    fn mlp(
        &self,
        program: &mut ProgramBuilder,
        params: &ParamSlots,
        rows: usize,
        (layer, h): (usize, Slot),
    ) -> Result<Slot, PlanError> {
        let (d, d_ff, math) = (self.config.d_model, self.config.d_ff, program.math);
        let weight = |suffix: &str| params.get(&format!("model.layers.{layer}.mlp.{suffix}"));
        let gate_up =
            program.narrow_activation(format!("layers.{layer}.gate_up"), [rows, 2 * d_ff]);
        let [_, _, fused, down] = self.linears(layer);
        let projections = program.product_operand(weight("gate_up_proj.weight")?)?;
        let operands = (vec![h, projections], gate_up);
        fused.emit(program, params, self.lora.as_ref(), operands)?;
        let a = program.narrow_activation(format!("layers.{layer}.swiglu"), [rows, d_ff]);
        program.call(SwiGlu { rows, d_ff, math }, vec![gate_up], vec![a]);
        let y = program.narrow_activation(format!("layers.{layer}.mlp_out"), [rows, d]);
        let projection = program.product_operand(weight("down_proj.weight")?)?;
        let operands = (vec![a, projection], y);
        down.emit(program, params, self.lora.as_ref(), operands)?;
        Ok(y)
    }
}

impl Model for Decoder {
    fn parameters(&self) -> Vec<ParamGroup> {
        let c = &self.config;
        let std = Init::Normal {
            std: c.init_std as f32,
        };
        let table = ParamGroup::single(EMBED, [c.vocab_size, c.d_model], std);
        let mut groups = vec![match c.tie_embeddings {
            true => table,
            false => table.outside_products(),
        }];
        for layer in 0..c.n_layers {
            self.layer_parameters(layer, &mut groups);
        }
        groups.push(ParamGroup::single(FINAL_NORM, [c.d_model], Init::Ones));
        if !c.tie_embeddings {
            groups.push(ParamGroup::single(LM_HEAD, [c.vocab_size, c.d_model], std));
        }
        if let Some(lora) = &self.lora {
            for group in &mut groups {
                group.training = lora.training_of(group);
            }
            let linears = (0..c.n_layers).flat_map(|layer| self.linears(layer));
            groups.extend(linears.flat_map(|linear| lora.parameters(&linear)));
        }
        groups
    }

    fn derived(&self, seq_len: usize) -> Result<Vec<Derived>, PlanError> {
        let head_dim = self.config.head_dim;
        if head_dim > MAX_HEAD_DIM {
            return Err(PlanError::Size {
                what: "head_dim",
                expected: "at most 256",
                found: head_dim,
            });
        }
        Ok(vec![Derived {
            name: ROPE_TABLE,
            shape: vec![seq_len, head_dim / 2, 2],
            values: rope_table(seq_len, head_dim, self.config.rope_theta),
        }])
    }

    fn forward(
        &self,
        program: &mut ProgramBuilder,
        params: &ParamSlots,
        inputs: &StepInputs,
    ) -> Result<Head, PlanError> {
        let c = &self.config;
        let rows = inputs.rows();
        let table = params.get(EMBED)?;
        let x = program.activation("embed", [rows, c.d_model]);
        program.call(
            self.embed(rows, program.math),
            vec![inputs.ids, table],
            vec![x],
        );
        let mut stream = Stream {
            residual: x,
            delta: None,
        };
        for layer in 0..c.n_layers {
            program.mark_layer();
            let norm = params.get(&format!("model.layers.{layer}.input_layernorm.weight"))?;
            let name = format!("layers.{layer}.attention_norm");
            let h = self.norm(program, &mut stream, norm, &name, rows);
            stream.delta = Some(self.attention(program, params, inputs, (layer, h))?);
            let norm = format!("model.layers.{layer}.post_attention_layernorm.weight");
            let name = format!("layers.{layer}.mlp_norm");
            let h = self.norm(program, &mut stream, params.get(&norm)?, &name, rows);
            stream.delta = Some(self.mlp(program, params, rows, (layer, h))?);
        }
        program.mark_layer();
        let hidden = self.norm(
            program,
            &mut stream,
            params.get(FINAL_NORM)?,
            "final_norm",
            rows,
        );
        let weight = if c.tie_embeddings {
            table
        } else {
            params.get(LM_HEAD)?
        };
        Ok(Head {
            hidden,
            weight: program.product_operand(weight)?,
            vocab_size: c.vocab_size,
            d_model: c.d_model,
        })
    }
}

/// `(cos, sin)` of `position · theta^(-2i / head_dim)`, [seq_len, head_dim / 2, 2].
///
/// As transformers does it, the frequency and the angle are rounded to f32 before cosine and sine.
pub fn rope_table(seq_len: usize, head_dim: usize, theta: f64) -> Vec<f32> {
    let frequencies: Vec<f32> = (0..head_dim / 2)
        .map(|i| (1.0 / libm::pow(theta, (2 * i) as f64 / head_dim as f64)) as f32)
        .collect();
    let mut table = Vec::with_capacity(seq_len * head_dim);
    for position in 0..seq_len {
        for frequency in &frequencies {
            let (sin, cos) = num::sin_cos(position as f32 * frequency);
            table.extend([cos, sin]);
        }
    }
    table
}
