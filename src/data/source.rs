//! Where tokens come from, as a recipe says it.

use std::path::{Path, PathBuf};

use super::bin::{BinFile, TokenFormat};
use super::loader::LoaderConfig;
use super::sums::Sums;
use super::text::TextTokens;
use super::tokenizer::Tokenizer;
use super::windows::WindowOrder;
use crate::error::DataError;

/// The kinds of source a recipe can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceKind {
    /// Generated sums; needs no file.
    Sums,
    /// A text file and a tokenizer.
    Text,
    /// A file of tokens.
    Bin,
}

impl SourceKind {
    /// The lower-case name used in recipes.
    pub const fn name(self) -> &'static str {
        match self {
            SourceKind::Sums => "sums",
            SourceKind::Text => "text",
            SourceKind::Bin => "bin",
        }
    }
}

/// All that decides the batches of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct DataConfig {
    /// What kind of source.
    pub source: SourceKind,
    /// The file of [`SourceKind::Text`] and [`SourceKind::Bin`].
    pub path: Option<PathBuf>,
    /// The tokenizer of [`SourceKind::Text`], as [`Tokenizer::load`] takes it; bytes by default.
    pub tokenizer: Option<String>,
    /// The layout of the file of [`SourceKind::Bin`].
    pub token_format: TokenFormat,
    /// The fraction of the windows of a file that is set aside for validation, 0 or more and less
    /// than 1. [`SourceKind::Sums`] always sets a tenth of its pairs aside, whatever this is.
    pub validation: f64,
    /// Sequences in a batch.
    pub batch: usize,
    /// Tokens in a sequence.
    pub seq_len: usize,
    /// The seed of the order and of generated text.
    pub seed: u64,
    /// Tokens are below this number.
    pub vocab_size: usize,
    /// Which window of a file follows which.
    pub order: WindowOrder,
}

impl DataConfig {
    /// The part that does not say where tokens come from.
    pub fn loader(&self) -> LoaderConfig {
        LoaderConfig {
            validation: self.validation,
            batch: self.batch,
            seq_len: self.seq_len,
            seed: self.seed,
            vocab_size: self.vocab_size,
            order: self.order,
        }
    }
}

/// A stream of tokens that is cut into windows.
#[derive(Debug)]
pub enum TokenStream {
    /// Tokens in memory.
    Text(TextTokens),
    /// Tokens in a file.
    Bin(BinFile),
}

impl TokenStream {
    /// What messages call this stream.
    pub fn name(&self) -> &str {
        match self {
            TokenStream::Text(text) => text.name(),
            TokenStream::Bin(file) => file.name(),
        }
    }

    /// The number of tokens.
    pub fn tokens(&self) -> u64 {
        match self {
            TokenStream::Text(text) => text.tokens().len() as u64,
            TokenStream::Bin(file) => file.tokens(),
        }
    }

    /// Tokens `start..start + count`, each below `vocab_size`.
    ///
    /// # Errors
    /// The errors of [`BinFile::read`]; for a text, [`DataError::TokenInText`] and
    /// [`DataError::TooShort`] when it ends before `start + count`.
    pub fn read(&self, start: u64, count: usize, vocab_size: usize) -> Result<Vec<u32>, DataError> {
        match self {
            TokenStream::Text(text) => text.read(start, count, vocab_size),
            TokenStream::Bin(file) => file.read(start, count, vocab_size),
        }
    }
}

/// Where tokens come from.
#[derive(Debug)]
pub enum Source {
    /// Sequences without end, made as they are asked for.
    Sums(Sums),
    /// A stream with an end, walked through once in each epoch.
    Stream(TokenStream),
}

impl Source {
    /// Opens the source that `config` describes.
    ///
    /// # Errors
    /// [`DataError::MissingPath`], and the errors of [`Tokenizer::load`], [`TextTokens::open`] and
    /// [`BinFile::open`].
    pub fn open(config: &DataConfig) -> Result<Self, DataError> {
        let path = || -> Result<&Path, DataError> {
            config.path.as_deref().ok_or(DataError::MissingPath {
                kind: config.source.name(),
            })
        };
        let stream = match config.source {
            SourceKind::Sums => return Ok(Source::Sums(Sums::new())),
            SourceKind::Text => {
                let path = path()?;
                let tokenizer = Tokenizer::load(config.tokenizer.as_deref().unwrap_or("bytes"))?;
                TokenStream::Text(TextTokens::open(path, &tokenizer)?)
            }
            SourceKind::Bin => TokenStream::Bin(BinFile::open(path()?, config.token_format)?),
        };
        Ok(Source::Stream(stream))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(source: SourceKind, path: Option<PathBuf>) -> DataConfig {
        DataConfig {
            source,
            path,
            tokenizer: None,
            token_format: TokenFormat::U16,
            validation: 0.0,
            batch: 1,
            seq_len: 4,
            seed: 0,
            vocab_size: 256,
            order: WindowOrder::Shuffled,
        }
    }

    #[test]
    fn each_kind_opens() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "abcd").unwrap();
        let path = Some(file.path().to_path_buf());
        assert!(matches!(
            Source::open(&config(SourceKind::Sums, None)),
            Ok(Source::Sums(_))
        ));
        for (kind, tokens) in [(SourceKind::Text, 4), (SourceKind::Bin, 2)] {
            match Source::open(&config(kind, path.clone())) {
                Ok(Source::Stream(stream)) => assert_eq!(stream.tokens(), tokens),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_file_source_without_a_path_is_refused() {
        for source in [SourceKind::Text, SourceKind::Bin] {
            match Source::open(&config(source, None)) {
                Err(DataError::MissingPath { kind }) => assert_eq!(kind, source.name()),
                other => panic!("{other:?}"),
            }
        }
    }
}
