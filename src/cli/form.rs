//! How a command carries out steps, in place of what the recipe says.

use clap::Args;

use crate::error::ConfigError;
use crate::io::Recipe;
use crate::plan::{ComputedAgain, Plan, Recompute};

/// The options that decide memory and time and no bit.
#[derive(Args, Clone, Debug)]
pub struct FormArguments {
    /// Sequences that are computed at once, in place of data.micro_batch; decides no bit
    #[arg(long, value_name = "N")]
    micro_batch: Option<u64>,
    /// Layers whose activations are computed anew at a time, in place of memory.recompute; 0 keeps all; decides no bit
    #[arg(long, value_name = "LAYERS")]
    recompute: Option<u64>,
    /// The most bytes of the arena, in place of memory.arena_bytes: backward computes anew what is cheapest until it fits; decides no bit
    #[arg(long, value_name = "BYTES", conflicts_with = "recompute")]
    arena_bytes: Option<u64>,
}

impl FormArguments {
    /// The recipe with these options.
    ///
    /// # Errors
    /// A micro-batch that does not divide the batch in whole grains; a number out of range.
    pub fn apply(&self, mut recipe: Recipe) -> Result<Recipe, ConfigError> {
        let micro = self.micro_batch.map(|n| format!("data.micro_batch={n}"));
        let layers = self.recompute.map(|n| format!("memory.recompute={n}"));
        let bytes = self.arena_bytes.map(|n| format!("memory.arena_bytes={n}"));
        recipe.set_all(micro.iter().map(String::as_str))?;
        if let Some(memory) = layers.or(bytes) {
            recipe.set_memory(&memory)?;
        }
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
    match plan.config.form.recompute {
        Recompute::Nothing => {}
        Recompute::Layers(1) => parts.push("recomputation of each layer".to_owned()),
        Recompute::Layers(n) => parts.push(format!("recomputation of {n} layers at a time")),
        Recompute::Within { arena_bytes } => {
            parts.push(format!("an arena of at most {arena_bytes} bytes"));
        }
    }
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// What backward computes again, a line a call: of what op and tensor, in how many layers, and the bytes that are not
/// kept because of it.
pub fn again_lines(plan: &Plan) -> Vec<String> {
    let line = |again: &ComputedAgain| {
        let ComputedAgain {
            op,
            tensor,
            layers,
            bytes,
            ..
        } = again;
        let kept = match bytes {
            0 => String::new(),
            _ => format!(", {bytes} bytes not kept"),
        };
        let plural = if *layers == 1 { "" } else { "s" };
        format!("{op} ({tensor}) of {layers} layer{plural}{kept}")
    };
    plan.computed_again().iter().map(line).collect()
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
