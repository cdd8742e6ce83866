//! `bitstep inspect`.

use std::path::PathBuf;

use clap::Args;

use super::recipe_options::RecipeArguments;
use super::{Outcome, memory, output};
use crate::engine::run::plan_of;
use crate::error::{Error, ExitCode, RunError};
use crate::io::ModelFolder;
use crate::model::AnyConfig;
use crate::model::params::Training;
use crate::num::nf4::Quantisation;
use crate::plan::{Plan, PlanConfig, ProgramKind, Stored};

/// The longest sequence a model folder is planned for, which states no batch of its own.
const LONGEST: usize = 1024;

/// Arguments of `bitstep inspect`.
#[derive(Args, Debug)]
pub struct Inspect {
    /// A recipe, or a Hugging Face model folder
    #[arg(value_name = "RECIPE|MODEL")]
    path: PathBuf,
    /// Changes a key of the recipe, such as data.batch=8; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Prints the manifest and nothing else
    #[arg(long)]
    manifest: bool,
    /// Lists every parameter with its shape
    #[arg(long)]
    params: bool,
}

impl Inspect {
    /// Prints what a step is made of; computes nothing and needs no device.
    pub fn run(self) -> Outcome {
        let (config, plan, whole) = self.plan()?;
        let manifest = plan.manifest();
        if self.manifest {
            output::line(manifest.text().trim_end());
            return Ok(ExitCode::Done);
        }
        output::line(model_line(&config));
        output::line(format_args!("parameters  {}", parameters_text(&plan)));
        output::line(format_args!(
            "batch       {} sequences of {} tokens",
            plan.config.batch, plan.inputs.seq_len
        ));
        output::line(program_text(&plan));
        output::line(format_args!(
            "work        {:.3} GFLOP a step, {:.3} GFLOP an evaluation",
            plan.step_flops() as f64 / 1e9,
            evaluation_flops(&plan) as f64 / 1e9
        ));
        if let Some(whole) = &whole {
            output::line(form_text(&plan, whole));
            for line in super::form::again_lines(&plan) {
                output::line(format_args!("again       {line}"));
            }
        }
        output::line(format_args!("domain      {}", plan.config.math.domain()));
        output::line(format_args!("head        {}", head_text(&plan)));
        output::line(format_args!("manifest    {}", manifest.hash()));
        output::line(memory::heading(&plan.layout.describe()));
        if self.params {
            output::line("parameters in arena order");
            for param in &plan.params {
                let shape = plan.shape_of(param);
                let training = training_name(param.training);
                output::line(format_args!("  {} {shape} {training}", param.name));
            }
        }
        Ok(ExitCode::Done)
    }

    /// The plan, and where the step does not come in the form that defines its bits the plan of that form.
    fn plan(&self) -> Result<(AnyConfig, Plan, Option<Plan>), Error> {
        if self.path.is_dir() {
            if !self.set.is_empty() {
                let folder = self.path.display().to_string();
                return Err(RunError::SetOnFolder { folder }.into());
            }
            let config = ModelFolder::open(&self.path)?.config().clone();
            let window = PlanConfig::of(1, config.positions().map_or(LONGEST, |p| p.min(LONGEST)));
            let plan = Plan::build(config.model().as_ref(), window)?;
            return Ok((config, plan, None));
        }
        let arguments = RecipeArguments {
            recipe: self.path.clone(),
            set: self.set.clone(),
        };
        let recipe = arguments.open(None)?;
        let plan = plan_of(&recipe)?;
        let whole = match plan.config.form.is_defining() {
            true => None,
            false => Some(plan_of(&recipe.defining())?),
        };
        Ok((recipe.model_config()?, plan, whole))
    }
}

fn model_line(config: &AnyConfig) -> String {
    let tied = match config.tie_embeddings() {
        true => "tied",
        false => "untied",
    };
    let sizes = match config {
        AnyConfig::Decoder(config) => format!(
            "{} query and {} key/value heads of {}, d_ff {}",
            config.n_heads, config.n_kv_heads, config.head_dim, config.d_ff
        ),
        AnyConfig::Mamba(config) => format!(
            "{} channels of {} states, convolution over {}, time steps of rank {}",
            config.d_inner(),
            config.d_state,
            config.d_conv,
            config.dt_rank
        ),
    };
    let positions = match config.positions() {
        Some(positions) => format!("up to {positions} positions"),
        None => "any number of positions".to_owned(),
    };
    format!(
        "model       {}: {} layers, d_model {}, {sizes}, vocabulary {} ({tied}), {positions}",
        config.family(),
        config.n_layers(),
        config.d_model(),
        config.vocab_size(),
    )
}

/// The programs of a step and their calls.
fn program_text(plan: &Plan) -> String {
    let calls = |kind| plan.calls(kind).len();
    let evaluate = calls(ProgramKind::Evaluate);
    if !plan.config.is_split() {
        let step = calls(ProgramKind::Step);
        return format!("program     {step} calls a step, {evaluate} calls an evaluation");
    }
    format!(
        "programs    {} passes of {} calls and an update of {} calls a step, {evaluate} calls an evaluation of a pass",
        plan.config.passes(),
        calls(ProgramKind::Accumulate),
        calls(ProgramKind::Apply),
    )
}

/// Floating-point operations of an evaluation of a whole batch.
fn evaluation_flops(plan: &Plan) -> u64 {
    plan.config.passes() as u64 * plan.flops(ProgramKind::Evaluate)
}

/// What the form of the step saves of memory, and what it costs: activations, everything, and work, beside the step
/// as one program with all activations kept.
fn form_text(plan: &Plan, whole: &Plan) -> String {
    let form = super::form::text_of(plan).unwrap_or_default();
    let local = |p: &Plan| p.layout.arena_bytes() - p.layout.persistent_bytes();
    let bytes = |of: &dyn Fn(&Plan) -> usize| {
        let [here, there] = [plan, whole].map(of);
        format!(
            "{} instead of {}",
            output::bytes(here),
            output::bytes(there)
        )
    };
    let work = plan.step_flops() as f64 / whole.step_flops().max(1) as f64;
    format!(
        "form        {form}\nmemory      {} within a step, {} in all\ntime        {:.3} times the work of one program that keeps all activations",
        bytes(&local),
        bytes(&|p: &Plan| p.layout.arena_bytes()),
        work
    )
}

fn training_name(training: Training) -> &'static str {
    match training {
        Training::Decayed => "decayed",
        Training::Undecayed => "undecayed",
        Training::Frozen => "frozen",
        Training::FrozenProduct => "frozen for products",
        Training::Packed(Quantisation::Once) => "frozen nf4",
        Training::Packed(Quantisation::Double) => "frozen nf4, doubly quantised",
    }
}

/// All parameters, and how many elements each kind has.
fn parameters_text(plan: &Plan) -> String {
    let always = [Training::Decayed, Training::Undecayed, Training::Frozen];
    let packed = [Quantisation::Once, Quantisation::Double].map(Training::Packed);
    let kinds = [&[Training::FrozenProduct], &packed[..]].concat();
    let count = |kind: Training| -> usize {
        let params = plan.params.iter().filter(|p| p.training == kind);
        let values = params.filter(|p| p.stored != Stored::Maxima);
        values.map(|p| plan.shape_of(p).elements()).sum()
    };
    let kinds = kinds.into_iter().filter(|&kind| count(kind) > 0);
    let text = |kind| format!("{} {}", count(kind), training_name(kind));
    let groups: Vec<String> = always.into_iter().chain(kinds).map(text).collect();
    let (count, tensors) = (plan.parameter_count(), plan.params.len());
    format!("{count} in {tensors} tensors: {}", groups.join(", "))
}

/// The row chunks in which logits exist.
fn head_text(plan: &Plan) -> String {
    let rows = plan
        .logits
        .iter()
        .map(|(slot, _)| plan.slots.spec(*slot).shape.elements() / plan.vocab_size.max(1));
    let most = rows.max().unwrap_or(0);
    let bytes = most * plan.vocab_size * plan.config.math.storage().size();
    let chunks = plan.logits.len();
    format!(
        "{chunks} row chunk{} of at most {most} x {} logits, {}",
        if chunks == 1 { "" } else { "s" },
        plan.vocab_size,
        super::output::bytes(bytes)
    )
}
