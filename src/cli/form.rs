//! How a command carries out steps, in place of what the recipe says.

use clap::Args;

use crate::error::ConfigError;
use crate::io::Recipe;
use crate::plan::Plan;

/// The options that decide memory and time and no bit.
#[derive(Args, Clone, Debug)]
pub struct FormArguments {
    /// Sequences that are computed at once, in place of data.micro_batch; decides no bit
    #[arg(long, value_name = "N")]
    micro_batch: Option<u64>,
    /// Layers whose activations are computed anew at a time, in place of memory.recompute; 0 keeps all; decides no bit
    #[arg(long, value_name = "LAYERS")]
    recompute: Option<u64>,
}

impl FormArguments {
    /// The recipe with these options.
    ///
    /// # Errors
    /// A micro-batch that does not divide the batch in whole grains.
    pub fn apply(&self, mut recipe: Recipe) -> Result<Recipe, ConfigError> {
        let micro = self.micro_batch.map(|n| format!("data.micro_batch={n}"));
        let layers = self.recompute.map(|n| format!("memory.recompute={n}"));
        let set: Vec<String> = micro.into_iter().chain(layers).collect();
        recipe.set_all(set.iter().map(String::as_str))?;
        Ok(recipe)
    }
}

/// How a plan carries out its step, where that is not the form that defines the bits.
pub fn text_of(plan: &Plan) -> Option<String> {
    let mut parts = Vec::new();
    if plan.config.is_split() {
        let sequences = plan.config.pass_sequences();
        parts.push(format!("passes of {sequences} sequences"));
    }
    if let Some(layers) = plan.config.form.recompute_layers {
        let layers = match layers {
            1 => "each layer".to_owned(),
            n => format!("{n} layers at a time"),
        };
        parts.push(format!("recomputation of {layers}"));
    }
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// The recipe with its whole batch in one pass, for commands that look at the step as one program; says so where
/// that leaves something out.
pub fn in_one_pass(mut recipe: Recipe) -> Recipe {
    if recipe.data.micro_batch.take().is_some() {
        super::output::note(
            "note: data.micro_batch is left out here: the step runs as one program",
        );
    }
    recipe
}
