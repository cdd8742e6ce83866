//! Errors of a run as a whole: its folder, its end, what is asked of a trained model.

use thiserror::Error;

use super::ExitCode;

/// What stands in the way of a run or of an answer from its model.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RunError {
    /// The folder for the results holds something already.
    #[error(
        "{folder} is not empty, and a run is never overwritten: choose another --out or remove it"
    )]
    FolderNotEmpty { folder: String },
    /// The operating system refused to write a result.
    #[error("cannot write {path}: {source}")]
    Write {
        path: String,
        #[source]
        source: std::io::Error,
    },
    /// The operating system refused to read what a run has left.
    #[error("cannot read {path}: {source}")]
    Read {
        path: String,
        #[source]
        source: std::io::Error,
    },
    /// What a run has left cannot be understood; lines count from 1.
    #[error("{file}:{line}: {message}")]
    History {
        file: String,
        line: usize,
        message: String,
    },
    /// A folder in which no run has taken a step.
    #[error("{folder} has no metrics.jsonl with a step: expected the folder of a run, train --out")]
    NoSteps { folder: String },
    /// Training met a value that is infinite or not a number.
    #[error(
        "training stopped at step {step}: the {what} is {found}; the weights are those before it. Lower optimizer.lr, or lengthen schedule.warmup"
    )]
    NonFinite {
        step: u64,
        what: &'static str,
        found: f32,
    },
    /// The loss on the data set aside is infinite or not a number.
    #[error("the loss on the data set aside is {found}: the model's weights are damaged")]
    NonFiniteScore { found: f64 },
    /// A golden would hold steps that trained nothing.
    #[error(
        "step {step} has the {what} {found}, so nothing was trained: lower optimizer.lr or mend the model before it is blessed"
    )]
    NonFiniteGolden {
        step: u64,
        what: &'static str,
        found: f32,
    },
    /// A model's logits cannot be compared.
    #[error(
        "the model's logits after {tokens} tokens are not finite (vocabulary entry {index} is {found}): its weights are damaged"
    )]
    NonFiniteLogits {
        tokens: usize,
        index: usize,
        found: f32,
    },
    /// The recipe sets nothing aside to evaluate on.
    #[error("{recipe} sets no data aside: add --set data.validation=0.1")]
    NoValidation { recipe: String },
    /// A change of a recipe was given with a model folder.
    #[error("--set changes a recipe, but {folder} is a model folder: leave --set out")]
    SetOnFolder { folder: String },
    /// A prompt without a token.
    #[error("the prompt is empty: expected at least one token")]
    EmptyPrompt,
    /// A prompt has a token that the model lacks.
    #[error(
        "the prompt's token {position} is {found}, but the model has tokens 0..{vocab_size}: use the tokenizer it was trained with (--tokenizer)"
    )]
    PromptToken {
        position: usize,
        found: u32,
        vocab_size: usize,
    },
    /// Prompt and answer together are longer than the model's positions.
    #[error(
        "{prompt} tokens of prompt and {wanted} to generate exceed the model's {maximum} positions: shorten the prompt or lower --tokens to {most}",
        most = maximum.saturating_sub(*prompt)
    )]
    ContextTooLong {
        prompt: usize,
        wanted: usize,
        maximum: usize,
    },
    /// A sampling option that gives no distribution.
    #[error("{name} is {found}, expected {expected}")]
    Sampling {
        name: &'static str,
        expected: &'static str,
        found: f64,
    },
}

impl RunError {
    /// The exit code of the command line for this error.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            RunError::Write { .. }
            | RunError::Read { .. }
            | RunError::History { .. }
            | RunError::NoSteps { .. } => ExitCode::Data,
            RunError::NonFinite { .. }
            | RunError::NonFiniteScore { .. }
            | RunError::NonFiniteGolden { .. }
            | RunError::NonFiniteLogits { .. } => ExitCode::NonFinite,
            _ => ExitCode::Usage,
        }
    }
}
