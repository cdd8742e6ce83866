//! Mamba of the first generation: norm, input product, causal convolution, selective scan, output product.
//!
//! Names are those of Hugging Face's `MambaForCausalLM`. `A = -exp(A_log)` is computed by the scan from the
//! parameter itself, so it follows every update.

use super::mamba_config::{Decay, MambaConfig};
use super::params::{Init, ParamGroup, Training};
use super::stream::{Norm, Stream};
use super::{CarriedTensor, Derived, Head, Model};
use crate::error::PlanError;
use crate::op::Slot;
use crate::op::conv1d::{Conv1d, ConvShape};
use crate::op::embed::Embed;
use crate::op::matmul::Matmul;
use crate::op::scan::{SCAN_CHUNK, Scan, ScanShape};
use crate::op::split_columns::SplitColumns;
use crate::plan::{ParamSlots, StepInputs};
use crate::program::ProgramBuilder;

pub(super) const EMBED: &str = "backbone.embeddings.weight";
const FINAL_NORM: &str = "backbone.norm_f.weight";
const LM_HEAD: &str = "lm_head.weight";

/// The range of the time steps that fresh biases give.
const FRESH_STEPS: (f64, f64) = (1e-3, 1e-1);

/// Whether a window goes on where the one before ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Windows {
    /// Every window is a sequence of its own.
    #[default]
    Separate,
    /// States are carried from step to step, for the sequences whose flag says so.
    Carried,
}

/// Whether a model has embedding and head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ends {
    /// Tokens in, logits and a loss out.
    #[default]
    Tokens,
    /// The backbone alone: features in, features out.
    Features,
}

/// A Mamba model.
#[derive(Clone, Debug)]
pub struct Mamba {
    config: MambaConfig,
    windows: Windows,
    ends: Ends,
}

impl Mamba {
    /// The model of a configuration; every window begins with empty states.
    pub fn new(config: MambaConfig) -> Self {
        Mamba {
            config,
            windows: Windows::Separate,
            ends: Ends::Tokens,
        }
    }

    /// The layers and the final norm of the same model, without embedding, head and loss.
    pub fn backbone_alone(self) -> Self {
        let ends = Ends::Features;
        Mamba { ends, ..self }
    }

    /// The same model with another rule for windows.
    pub fn with_windows(self, windows: Windows) -> Self {
        Mamba { windows, ..self }
    }

    fn carried_windows(&self) -> bool {
        self.windows == Windows::Carried
    }

    fn layer_parameters(&self, layer: usize, groups: &mut Vec<ParamGroup>) {
        let c = &self.config;
        let (d, d_inner, n) = (c.d_model, c.d_inner(), c.d_state);
        let name = |suffix: &str| format!("backbone.layers.{layer}.mixer.{suffix}");
        let normal = |std: f64| Init::Normal { std: std as f32 };
        let std = normal(c.init_std);
        // The deviations of the uniform numbers that the reference implementation draws.
        let taps = normal(1.0 / (3.0 * c.d_conv as f64).sqrt());
        let steps = normal(1.0 / (3.0 * c.dt_rank as f64).sqrt());
        let (low, high) = FRESH_STEPS;
        let columns = c.dt_rank + 2 * n;
        let mut a_log = ParamGroup::single(name("A_log"), [d_inner, n], Init::LogOfColumn);
        if c.decay == Decay::Reference {
            a_log.training = Training::Undecayed;
        }
        groups.extend([
            ParamGroup::single(name("in_proj.weight"), [2 * d_inner, d], std),
            ParamGroup::single(name("conv1d.weight"), [d_inner, 1, c.d_conv], taps),
            ParamGroup::single(name("conv1d.bias"), [d_inner], Init::Zeros),
            ParamGroup::single(name("x_proj.weight"), [columns, d_inner], std),
            ParamGroup::single(name("dt_proj.weight"), [d_inner, c.dt_rank], steps),
            ParamGroup::single(
                name("dt_proj.bias"),
                [d_inner],
                Init::StepBias { low, high },
            ),
            a_log,
            ParamGroup::single(name("D"), [d_inner], Init::Ones),
            ParamGroup::single(name("out_proj.weight"), [d, d_inner], std),
        ]);
        let norm = format!("backbone.layers.{layer}.norm.weight");
        groups.push(ParamGroup::single(norm, [d], Init::Ones));
    }

    fn norm(
        &self,
        program: &mut ProgramBuilder,
        stream: &mut Stream,
        norm: (Slot, &str, usize),
    ) -> Slot {
        let (weight, name, rows) = norm;
        let norm = Norm {
            weight,
            name,
            rows,
            d_model: self.config.d_model,
            eps: self.config.rms_norm_eps,
        };
        stream.norm(program, &norm)
    }

    /// The layers and the final norm over features [rows, d_model].
    fn backbone(
        &self,
        program: &mut ProgramBuilder,
        params: &ParamSlots,
        inputs: &StepInputs,
        features: Slot,
    ) -> Result<Slot, PlanError> {
        let mut stream = Stream {
            residual: features,
            delta: None,
        };
        let rows = inputs.rows();
        for index in 0..self.config.n_layers {
            program.mark_layer();
            let weight = params.get(&format!("backbone.layers.{index}.norm.weight"))?;
            let name = format!("layers.{index}.norm");
            let h = self.norm(program, &mut stream, (weight, &name, rows));
            let layer = Layer {
                config: &self.config,
                index,
                carried: self.carried_windows(),
                params,
                inputs,
            };
            stream.delta = Some(layer.mixer(program, h)?);
        }
        program.mark_layer();
        let weight = params.get(FINAL_NORM)?;
        Ok(self.norm(program, &mut stream, (weight, "final_norm", rows)))
    }
}

/// One block while its calls are emitted.
struct Layer<'a> {
    config: &'a MambaConfig,
    index: usize,
    carried: bool,
    params: &'a ParamSlots,
    inputs: &'a StepInputs,
}

impl Layer<'_> {
    fn weight(&self, suffix: &str) -> Result<Slot, PlanError> {
        let index = self.index;
        self.params
            .get(&format!("backbone.layers.{index}.mixer.{suffix}"))
    }

    fn local(&self, what: &str) -> String {
        format!("layers.{}.{what}", self.index)
    }

    /// `x · weightᵀ` under the name `what`.
    fn product(
        &self,
        program: &mut ProgramBuilder,
        x: Slot,
        (weight, what): (&str, &str),
        (n_in, n_out): (usize, usize),
    ) -> Result<Slot, PlanError> {
        let rows = self.inputs.rows();
        let y = program.narrow_activation(self.local(what), [rows, n_out]);
        let weight = program.product_operand(self.weight(weight)?)?;
        let product = Matmul {
            rows,
            n_in,
            n_out,
            bias: false,
            math: program.math,
        };
        program.call(product, vec![x, weight], vec![y]);
        Ok(y)
    }

    /// Adds the operands of a state that is carried from window to window.
    fn carry(
        &self,
        what: &str,
        reads: &mut Vec<Slot>,
        writes: &mut Vec<Slot>,
    ) -> Result<(), PlanError> {
        if self.carried {
            let (state, next, keep) = self.inputs.carried(&self.local(what))?;
            reads.extend([state, keep]);
            writes.push(next);
        }
        Ok(())
    }

    fn mixer(&self, program: &mut ProgramBuilder, h: Slot) -> Result<Slot, PlanError> {
        let c = self.config;
        let (rows, d_inner, n) = (self.inputs.rows(), c.d_inner(), c.d_state);
        let xz = self.product(
            program,
            h,
            ("in_proj.weight", "xz"),
            (c.d_model, 2 * d_inner),
        )?;
        let u = self.convolution(program, xz)?;
        // The scan reads `u` through a view of its own, so that its gradient and that of the product are two
        // tensors, which the convolution's backward adds.
        let u_scan = program
            .slots
            .view(u, 0, self.local("u.scan"), [rows, d_inner])?;
        let columns = c.dt_rank + 2 * n;
        let dt_bc = self.product(program, u, ("x_proj.weight", "dt_bc"), (d_inner, columns))?;
        let low = program.narrow_activation(self.local("dt_low"), [rows, c.dt_rank]);
        let bc = program.narrow_activation(self.local("bc"), [rows, 2 * n]);
        let split = SplitColumns {
            rows,
            n_left: c.dt_rank,
            n_right: 2 * n,
            math: program.math,
        };
        program.call(split, vec![dt_bc], vec![low, bc]);
        let dt = self.product(program, low, ("dt_proj.weight", "dt"), (c.dt_rank, d_inner))?;
        let out = self.scan(program, [u_scan, dt, bc, xz])?;
        self.product(
            program,
            out,
            ("out_proj.weight", "out"),
            (d_inner, c.d_model),
        )
    }

    fn convolution(&self, program: &mut ProgramBuilder, xz: Slot) -> Result<Slot, PlanError> {
        let (c, inputs) = (self.config, self.inputs);
        let u = program.narrow_activation(self.local("u"), [inputs.rows(), c.d_inner()]);
        let op = Conv1d {
            shape: ConvShape {
                batch: inputs.batch,
                seq_len: inputs.seq_len,
                d_inner: c.d_inner(),
                d_conv: c.d_conv,
            },
            carried: self.carried,
            math: program.math,
        };
        let mut reads = vec![
            xz,
            self.weight("conv1d.weight")?,
            self.weight("conv1d.bias")?,
        ];
        let mut writes = vec![u];
        self.carry("conv_state", &mut reads, &mut writes)?;
        program.call(op, reads, writes);
        Ok(u)
    }

    /// `operands` are `u`, `dt`, `bc` and `xz`.
    fn scan(&self, program: &mut ProgramBuilder, operands: [Slot; 4]) -> Result<Slot, PlanError> {
        let (c, inputs) = (self.config, self.inputs);
        let shape = ScanShape {
            batch: inputs.batch,
            seq_len: inputs.seq_len,
            d_inner: c.d_inner(),
            d_state: c.d_state,
            chunk: SCAN_CHUNK,
        };
        let out = program.narrow_activation(self.local("scan"), [shape.rows(), c.d_inner()]);
        let starts = [shape.batch, shape.chunks(), c.d_inner(), c.d_state];
        let starts = program.activation(self.local("scan.starts"), starts);
        let mut reads = operands.to_vec();
        for weight in ["A_log", "D", "dt_proj.bias"] {
            reads.push(self.weight(weight)?);
        }
        let mut writes = vec![out, starts];
        self.carry("scan_state", &mut reads, &mut writes)?;
        let op = Scan {
            shape,
            carried: self.carried,
            math: program.math,
        };
        program.call(op, reads, writes);
        Ok(out)
    }
}

impl Model for Mamba {
    fn parameters(&self) -> Vec<ParamGroup> {
        let c = &self.config;
        let std = Init::Normal {
            std: c.init_std as f32,
        };
        let tokens = self.ends == Ends::Tokens;
        let mut groups = Vec::new();
        if tokens {
            let table = ParamGroup::single(EMBED, [c.vocab_size, c.d_model], std);
            groups.push(match c.tie_embeddings {
                true => table,
                false => table.outside_products(),
            });
        }
        for layer in 0..c.n_layers {
            self.layer_parameters(layer, &mut groups);
        }
        groups.push(ParamGroup::single(FINAL_NORM, [c.d_model], Init::Ones));
        if tokens && !c.tie_embeddings {
            groups.push(ParamGroup::single(LM_HEAD, [c.vocab_size, c.d_model], std));
        }
        groups
    }

    fn derived(&self, _seq_len: usize) -> Result<Vec<Derived>, PlanError> {
        Ok(Vec::new())
    }

    fn features(&self) -> Option<usize> {
        (self.ends == Ends::Features).then_some(self.config.d_model)
    }

    fn carried(&self, batch: usize) -> Vec<CarriedTensor> {
        let c = &self.config;
        if !self.carried_windows() {
            return Vec::new();
        }
        let tensor = |name: String, columns| CarriedTensor {
            name,
            shape: [batch, c.d_inner(), columns].into(),
        };
        let layers = (0..c.n_layers).flat_map(|layer| {
            [
                tensor(format!("layers.{layer}.conv_state"), c.d_conv - 1),
                tensor(format!("layers.{layer}.scan_state"), c.d_state),
            ]
        });
        layers.collect()
    }

    fn forward(
        &self,
        program: &mut ProgramBuilder,
        params: &ParamSlots,
        inputs: &StepInputs,
    ) -> Result<Head, PlanError> {
        let c = &self.config;
        let rows = inputs.rows();
        if let Some(features) = inputs.features {
            let hidden = self.backbone(program, params, inputs, features.input)?;
            return Ok(Head {
                hidden,
                weight: hidden,
                vocab_size: 1,
                d_model: c.d_model,
            });
        }
        let table = params.get(EMBED)?;
        let x = program.activation("embed", [rows, c.d_model]);
        let op = Embed {
            rows,
            vocab_size: c.vocab_size,
            d_model: c.d_model,
        };
        program.call(op, vec![inputs.ids, table], vec![x]);
        let hidden = self.backbone(program, params, inputs, x)?;
        let weight = match c.tie_embeddings {
            true => table,
            false => params.get(LM_HEAD)?,
        };
        Ok(Head {
            hidden,
            weight: program.product_operand(weight)?,
            vocab_size: c.vocab_size,
            d_model: c.d_model,
        })
    }
}
