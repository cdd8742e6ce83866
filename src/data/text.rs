//! A text as tokens in memory.

use std::path::Path;

use super::tokenizer::Tokenizer;
use crate::error::DataError;

/// A stream of tokens in memory, with the name that messages call it.
#[derive(Clone, Debug)]
pub struct TextTokens {
    name: String,
    tokens: Vec<u32>,
}

impl TextTokens {
    /// Reads the file at `path` and makes tokens of it; the whole file is one text.
    ///
    /// # Errors
    /// [`DataError::Read`] when the file cannot be read, and the errors of
    /// [`Tokenizer::encode_bytes`].
    pub fn open(path: &Path, tokenizer: &Tokenizer) -> Result<Self, DataError> {
        let name = path.display().to_string();
        let bytes = std::fs::read(path).map_err(|source| DataError::Read {
            path: name.clone(),
            source,
        })?;
        let tokens = tokenizer.encode_bytes(&bytes, &name)?;
        Ok(TextTokens { name, tokens })
    }

    /// A stream of tokens that is already in memory.
    pub fn from_tokens(name: impl Into<String>, tokens: Vec<u32>) -> Self {
        TextTokens {
            name: name.into(),
            tokens,
        }
    }

    /// What messages call this stream.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The tokens, in the order of the text.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens `start..start + count`.
    pub(super) fn read(
        &self,
        start: u64,
        count: usize,
        vocab_size: usize,
    ) -> Result<Vec<u32>, DataError> {
        let end = start.saturating_add(count as u64);
        let range = usize::try_from(start).unwrap_or(usize::MAX)
            ..usize::try_from(end).unwrap_or(usize::MAX);
        let Some(tokens) = self.tokens.get(range) else {
            return Err(DataError::TooShort {
                path: self.name.clone(),
                expected: end,
                found: self.tokens.len() as u64,
            });
        };
        match tokens.iter().position(|&t| t as usize >= vocab_size) {
            None => Ok(tokens.to_vec()),
            Some(i) => Err(DataError::TokenInText {
                path: self.name.clone(),
                index: start + i as u64,
                vocab_size,
                found: tokens[i],
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_any_bytes_is_read_as_bytes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [0, 255, 10]).unwrap();
        let text = TextTokens::open(file.path(), &Tokenizer::Bytes).unwrap();
        assert_eq!(text.tokens(), [0, 255, 10]);
        assert_eq!(text.name(), file.path().to_str().unwrap());
    }

    #[test]
    fn a_missing_file_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing.txt");
        match TextTokens::open(&missing, &Tokenizer::Bytes) {
            Err(DataError::Read { path, .. }) => assert!(path.ends_with("missing.txt")),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_token_at_the_vocabulary_size_is_refused_with_its_place() {
        let text = TextTokens::from_tokens("story", vec![0, 9, 10, 11]);
        assert_eq!(text.read(1, 3, 12).unwrap(), [9, 10, 11]);
        match text.read(1, 3, 10) {
            Err(DataError::TokenInText {
                path,
                index: 2,
                vocab_size: 10,
                found: 10,
            }) => assert_eq!(path, "story"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn reading_past_the_end_is_refused() {
        let text = TextTokens::from_tokens("story", vec![0, 9, 10, 11]);
        assert!(matches!(
            text.read(2, 3, 12),
            Err(DataError::TooShort {
                expected: 5,
                found: 4,
                ..
            })
        ));
        assert!(text.read(u64::MAX, 1, 12).is_err());
    }
}
