//! `bitstep generate`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use serde_json::{Map, Value, json};

use super::device::DeviceArguments;
use super::precision::PrecisionArgument;
use super::{Outcome, output};
use crate::backend::Backend;
use crate::data::Tokenizer;
use crate::engine::generate::{Request, Sampling, Stopped, check_length, check_prompt, generate};
use crate::engine::run::load_folder;
use crate::engine::{Hyper, Trainer};
use crate::error::{Error, ExitCode};
use crate::io::ModelFolder;
use crate::plan::{Plan, PlanConfig};
use crate::shape::Math;

/// Windows are a multiple of this many positions, so that prompts of about one length share a plan.
const WINDOW_STEP: usize = 32;
/// Tokens generated where nothing says how many.
const TOKENS: usize = 32;

/// Arguments of `bitstep generate`.
#[derive(Args, Debug)]
pub struct Generate {
    /// A Hugging Face model folder, such as the model/ of a run
    model: PathBuf,
    /// The text to continue
    prompt: String,
    /// Tokens to generate at most [default: 32, or as many as the model has positions for]
    #[arg(long, value_name = "N")]
    tokens: Option<usize>,
    /// Randomness: 0 always takes the likeliest token
    #[arg(
        long,
        value_name = "T",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    temperature: f32,
    /// Samples among the K likeliest tokens only
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// The seed of the samples; one seed gives one text
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// A tokenizer.json, or bytes [default: the model's tokenizer.json, else bytes]
    #[arg(long, value_name = "FILE|bytes")]
    tokenizer: Option<String>,
    /// Prints one JSON object: prompt, text, tokens and why generation stopped
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    precision: PrecisionArgument,
    #[command(flatten)]
    device: DeviceArguments,
}

impl Generate {
    /// Continues the prompt and prints prompt and continuation.
    pub fn run(self) -> Outcome {
        let folder = ModelFolder::open(&self.model)?;
        let tokenizer = Tokenizer::load(&self.tokenizer_name())?;
        let prompt = tokenizer.encode(&self.prompt)?;
        let maximum = folder.config().positions().unwrap_or(usize::MAX);
        let room = maximum.saturating_sub(prompt.len());
        let tokens = self.tokens.unwrap_or(TOKENS.min(room));
        let request = Request {
            tokens,
            eos: eos_tokens(folder.json()),
            sampling: Sampling {
                temperature: self.temperature,
                top_k: self.top_k,
                seed: self.seed,
            },
        };
        // Whatever does not fit is told before the weights are read.
        request.sampling.validate()?;
        check_prompt(&prompt, folder.config().vocab_size())?;
        check_length(prompt.len(), tokens, maximum)?;
        let length = prompt.len().saturating_add(tokens);
        let planned = (length, self.precision.math());
        let mut trainer = open(&folder, planned, self.device.open()?)?;
        let found = generate(&mut trainer, &prompt, &request)?;
        let text = tokenizer.decode(&found.tokens)?;
        if self.json {
            let stopped = match found.stopped {
                Stopped::Eos => "eos",
                Stopped::Length => "length",
            };
            output::line(json!({
                "prompt": self.prompt, "text": text, "prompt_tokens": prompt,
                "tokens": found.tokens, "stopped": stopped,
            }));
        } else {
            output::line(format_args!("{}{text}", self.prompt));
        }
        Ok(ExitCode::Done)
    }

    fn tokenizer_name(&self) -> String {
        let own: &Path = &self.model.join("tokenizer.json");
        match &self.tokenizer {
            Some(name) => name.clone(),
            None if own.is_file() => own.display().to_string(),
            None => "bytes".to_owned(),
        }
    }
}

/// A trainer that holds the folder's model over a window of at least `length` positions.
fn open<B: Backend>(
    folder: &ModelFolder,
    (length, math): (usize, Math),
    backend: B,
) -> Result<Trainer<B>, Error> {
    let config = folder.config();
    let window = length.next_multiple_of(WINDOW_STEP);
    let window = window.min(config.positions().unwrap_or(window));
    let planned = PlanConfig {
        math,
        ..PlanConfig::of(1, window)
    };
    let plan = Plan::build(config.model().as_ref(), planned)?;
    let mut trainer = Trainer::new(backend, Arc::new(plan), Hyper::default(), 0)?;
    load_folder(&mut trainer, folder)?;
    Ok(trainer)
}

/// The tokens that end a text: `eos_token_id`, one number or several.
fn eos_tokens(json: &Map<String, Value>) -> Vec<u32> {
    let one = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match json.get("eos_token_id") {
        Some(Value::Array(ids)) => ids.iter().filter_map(one).collect(),
        Some(id) => one(id).into_iter().collect(),
        None => Vec::new(),
    }
}
