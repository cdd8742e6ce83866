//! Errors of training data.

use thiserror::Error;

/// A data source that cannot be used, or a batch that does not fit the program.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DataError {
    /// The operating system refused to read a file.
    #[error("cannot read {path}: {source}")]
    Read {
        path: String,
        #[source]
        source: std::io::Error,
    },
    /// A batch has other sizes than the program it is given to.
    #[error("the batch is [{}, {}], the program takes [{}, {}]", found[0], found[1], expected[0], expected[1])]
    BatchShape {
        expected: [usize; 2],
        found: [usize; 2],
    },
    /// A vector of a batch does not hold one element for each position.
    #[error("{field} of the batch holds {found} elements, expected {expected}")]
    BatchLength {
        field: &'static str,
        expected: usize,
        found: usize,
    },
    /// An input token of a batch is not in the vocabulary.
    #[error("input_ids[{row}, {column}] is {found}, expected 0..{vocab_size}")]
    InputId {
        row: usize,
        column: usize,
        vocab_size: usize,
        found: i32,
    },
    /// A target of a batch is neither in the vocabulary nor the mark of an ignored position.
    #[error("targets[{row}, {column}] is {found}, expected 0..{vocab_size} or -100 (ignored)")]
    Target {
        row: usize,
        column: usize,
        vocab_size: usize,
        found: i32,
    },
    /// A weight of a batch is infinite or not a number.
    #[error("weights[{row}, {column}] is {found}, expected a finite number")]
    Weight {
        row: usize,
        column: usize,
        found: f32,
    },
    /// A batch would have no position, or more than 2^31 - 1.
    #[error(
        "a batch of {batch} sequences of {seq_len} tokens: expected 1 to {maximum} tokens together"
    )]
    BatchSize {
        batch: usize,
        seq_len: usize,
        maximum: usize,
    },
    /// A generated source cannot fill sequences of this length.
    #[error("{name} needs seq_len from {minimum} to {maximum}, found {found}")]
    SeqLen {
        name: String,
        minimum: usize,
        maximum: usize,
        found: usize,
    },
    /// The model's vocabulary does not hold the tokens a generated source writes.
    #[error("{name} needs a vocab_size of at least {minimum}, found {found}")]
    VocabSize {
        name: String,
        minimum: usize,
        found: usize,
    },
    /// The validation split is not a fraction below one.
    #[error("validation is {found}, expected 0 or more and less than 1")]
    ValidationFraction { found: f64 },
    /// A source of files was asked for without the path of one.
    #[error("the data source \"{kind}\" needs a path")]
    MissingPath { kind: &'static str },
    /// A token stream is too short for one window of inputs and targets.
    #[error("{path} holds {found} tokens, expected at least {expected}")]
    TooShort {
        path: String,
        expected: u64,
        found: u64,
    },
    /// The validation split leaves nothing to train on.
    #[error(
        "{path}: no window is left to train on, {validation} of {windows} windows are for validation"
    )]
    NoTraining {
        path: String,
        windows: u64,
        validation: u64,
    },
    /// Consecutive order has a part of the stream for each row of a batch.
    #[error(
        "{path}: expected a training window for each row of a batch, {expected}, found {found}; lower data.batch or data.seq_len"
    )]
    FewWindows {
        path: String,
        expected: u64,
        found: u64,
    },
    /// Generated sums have no order that one sequence goes on from another.
    #[error(
        "generated sums have no consecutive windows; use text or tokens, or data.windows = \"shuffled\""
    )]
    NoConsecutiveWindows,
    /// Validation was asked for and no window is set aside for it.
    #[error(
        "{path}: no window is set aside for validation (validation = {fraction}, {windows} windows)"
    )]
    NoValidation {
        path: String,
        windows: u64,
        fraction: f64,
    },
    /// The step is beyond the sequences that can be numbered.
    #[error("step {cursor} with {batch} sequences a step is beyond the last epoch, {last_epoch}")]
    Cursor {
        cursor: u64,
        batch: usize,
        last_epoch: u32,
    },
    /// A tokenizer.json that the tokenizer library does not accept.
    #[error("{path} is not a tokenizer: {text}")]
    TokenizerFile { path: String, text: String },
    /// The tokenizer library failed on a text.
    #[error("the tokenizer failed: {text}")]
    Tokenizer { text: String },
    /// A token that the tokenizer does not have.
    #[error("token {found} is not in the tokenizer, expected 0..{vocab_size}")]
    UnknownToken { vocab_size: usize, found: u32 },
    /// A tokenizer of characters was given bytes that are not UTF-8.
    #[error("{path}: the bytes at {offset} are not UTF-8, which this tokenizer needs")]
    NotUtf8 { path: String, offset: usize },
    /// A text has a token that the model does not have.
    #[error("{path}: token number {index} is {found}, expected 0..{vocab_size}")]
    TokenInText {
        path: String,
        index: u64,
        vocab_size: usize,
        found: u32,
    },
    /// A token file has a token that the model does not have.
    #[error("{path}: the token at byte {offset} is {found}, expected 0..{vocab_size}")]
    TokenInFile {
        path: String,
        offset: u64,
        vocab_size: usize,
        found: u32,
    },
    /// The length of a headerless token file is not a whole number of tokens.
    #[error(
        "{path}: {found} bytes are no whole number of {expected}-byte tokens, the last one begins at byte {offset}"
    )]
    TokenFileLength {
        path: String,
        offset: u64,
        expected: u64,
        found: u64,
    },
    /// A token file ends before bytes that must be there.
    #[error("{path}: expected {expected} bytes at byte {offset}, found {found}")]
    Truncated {
        path: String,
        offset: u64,
        expected: u64,
        found: u64,
    },
    /// A token file does not begin with a number that names a known format.
    #[error("{path}: the magic number at byte {offset} is {found}, expected {} or {}", expected[0], expected[1])]
    Magic {
        path: String,
        offset: u64,
        expected: [i32; 2],
        found: i32,
    },
    /// A token file has another version of its format.
    #[error("{path}: the version at byte {offset} is {found}, expected {expected}")]
    Version {
        path: String,
        offset: u64,
        expected: i32,
        found: i32,
    },
    /// The header of a token file states another number of tokens than the file has bytes for.
    #[error(
        "{path}: the header states {found} tokens at byte {offset}, the file holds {bytes} bytes of {width}-byte tokens"
    )]
    TokenCount {
        path: String,
        offset: u64,
        bytes: u64,
        width: u64,
        found: i32,
    },
}
