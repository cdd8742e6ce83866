//! From text to tokens and back.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use crate::error::DataError;

/// How text becomes tokens.
#[derive(Clone, Debug)]
pub enum Tokenizer {
    /// Every byte is a token, and its number is the byte.
    Bytes,
    /// A `tokenizer.json` of the Hugging Face tokenizers library.
    HuggingFace(Box<tokenizers::Tokenizer>),
}

impl Tokenizer {
    /// The tokenizer that `spec` names: `bytes`, the path of a `tokenizer.json`, or the path of a
    /// folder with one.
    ///
    /// The truncation and the padding that the file may ask for are switched off: they are meant
    /// for single sentences and would cut a training text short.
    ///
    /// # Errors
    /// [`DataError::Read`] when the file cannot be read, [`DataError::TokenizerFile`] when it is
    /// not a tokenizer.
    pub fn load(spec: &str) -> Result<Self, DataError> {
        if spec == "bytes" {
            return Ok(Tokenizer::Bytes);
        }
        let mut file = Path::new(spec).to_path_buf();
        if file.is_dir() {
            file.push("tokenizer.json");
        }
        let path = file.display().to_string();
        let json = std::fs::read(&file).map_err(|source| DataError::Read {
            path: path.clone(),
            source,
        })?;
        let read = || {
            let mut tokenizer = tokenizers::Tokenizer::from_bytes(json)?;
            tokenizer.with_truncation(None)?;
            tokenizer.with_padding(None);
            Ok(tokenizer)
        };
        match caught(read) {
            Ok(tokenizer) => Ok(Tokenizer::HuggingFace(Box::new(tokenizer))),
            Err(text) => Err(DataError::TokenizerFile { path, text }),
        }
    }

    /// The tokens of `text`, without the special tokens that a template would put around it.
    ///
    /// # Errors
    /// [`DataError::Tokenizer`] when the library fails on the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match self {
            Tokenizer::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Tokenizer::HuggingFace(tokenizer) => {
                let encoding = caught(|| tokenizer.encode_fast(text, false)).map_err(failed)?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// The tokens of the bytes of `path`; any bytes will do for [`Tokenizer::Bytes`].
    ///
    /// # Errors
    /// [`DataError::NotUtf8`] when the tokenizer needs characters and the bytes are not UTF-8;
    /// [`DataError::Tokenizer`] when the library fails on the text.
    pub fn encode_bytes(&self, bytes: &[u8], path: &str) -> Result<Vec<u32>, DataError> {
        match self {
            Tokenizer::Bytes => Ok(bytes.iter().copied().map(u32::from).collect()),
            Tokenizer::HuggingFace(_) => match std::str::from_utf8(bytes) {
                Ok(text) => self.encode(text),
                Err(error) => Err(DataError::NotUtf8 {
                    path: path.to_string(),
                    offset: error.valid_up_to(),
                }),
            },
        }
    }

    /// The text of `tokens`; bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`DataError::UnknownToken`] for a token at or above [`Tokenizer::vocab_size`];
    /// [`DataError::Tokenizer`] when the library fails.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, DataError> {
        let vocab_size = self.vocab_size();
        let unknown = |&found: &u32| DataError::UnknownToken { vocab_size, found };
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocab_size) {
            return Err(unknown(token));
        }
        match self {
            Tokenizer::Bytes => {
                let bytes: Vec<u8> = tokens.iter().map(|&token| token as u8).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Tokenizer::HuggingFace(tokenizer) => {
                caught(|| tokenizer.decode(tokens, false)).map_err(failed)
            }
        }
    }

    /// One more than the largest token, which a model's vocabulary must reach; numbers below it
    /// that no text becomes are counted.
    pub fn vocab_size(&self) -> usize {
        match self {
            Tokenizer::Bytes => 256,
            Tokenizer::HuggingFace(tokenizer) => {
                let largest = tokenizer.get_vocab(true).into_values().max();
                largest.map_or(0, |token| token as usize + 1)
            }
        }
    }
}

fn failed(text: String) -> DataError {
    DataError::Tokenizer { text }
}

/// What the library says, or why it failed. On some files it panics where an error belongs, which must
/// not end a run; whatever it was working on is dropped.
fn caught<T>(act: impl FnOnce() -> Result<T, tokenizers::Error>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(outcome) => outcome.map_err(|error| error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            let text = text.unwrap_or("no reason given");
            Err(format!("the tokenizers library panicked: {text}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tokenizer of two words that asks for at most two tokens a text.
    const TWO_WORDS: &str = r#"{"version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"one": 0, "two": 5}, "unk_token": "[UNK]"}}"#;

    fn two_words() -> (tempfile::TempDir, Tokenizer) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), TWO_WORDS).unwrap();
        let tokenizer = Tokenizer::load(folder.path().to_str().unwrap()).unwrap();
        (folder, tokenizer)
    }

    #[test]
    fn bytes_are_their_own_tokens() {
        let tokenizer = Tokenizer::load("bytes").unwrap();
        assert_eq!(tokenizer.vocab_size(), 256);
        assert_eq!(tokenizer.encode("1+é").unwrap(), [49, 43, 0xC3, 0xA9]);
        assert_eq!(tokenizer.decode(&[49, 43, 0xC3, 0xA9]).unwrap(), "1+é");
        assert_eq!(tokenizer.encode_bytes(&[0xFF], "x").unwrap(), [255]);
        assert_eq!(tokenizer.decode(&[0xFF]).unwrap(), "\u{FFFD}");
    }

    #[test]
    fn a_tokenizer_file_is_read_and_does_not_truncate() {
        let (_folder, tokenizer) = two_words();
        assert_eq!(tokenizer.encode("two one two").unwrap(), [5, 0, 5]);
        assert_eq!(tokenizer.encode_bytes(b"one", "x").unwrap(), [0]);
        assert_eq!(tokenizer.decode(&[5, 0]).unwrap(), "two one");
        assert_eq!(tokenizer.vocab_size(), 6);
    }

    #[test]
    fn a_token_beyond_the_vocabulary_is_refused() {
        let (_folder, tokenizer) = two_words();
        for (tokenizer, size) in [(Tokenizer::Bytes, 256), (tokenizer, 6)] {
            match tokenizer.decode(&[0, size]) {
                Err(DataError::UnknownToken { vocab_size, found }) => {
                    assert_eq!((vocab_size, found), (size as usize, size));
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn bytes_that_are_not_text_are_refused_with_their_place() {
        let (_folder, tokenizer) = two_words();
        match tokenizer.encode_bytes(b"one \xFF", "story.txt") {
            Err(DataError::NotUtf8 { path, offset: 4 }) => assert_eq!(path, "story.txt"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_failure_of_the_library_is_passed_on() {
        // The unknown-word token of this file is not in its own vocabulary.
        let (_folder, tokenizer) = two_words();
        match tokenizer.encode("three") {
            Err(DataError::Tokenizer { text }) => assert!(text.contains("UNK"), "{text}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_malformed_file_is_refused_by_name() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for text in ["", "{}", "[1, 2", &TWO_WORDS[..TWO_WORDS.len() - 1]] {
            std::fs::write(file.path(), text).unwrap();
            let name = file.path().to_str().unwrap();
            match Tokenizer::load(name) {
                Err(DataError::TokenizerFile { path, text }) => {
                    assert_eq!(path, name);
                    assert!(!text.is_empty());
                }
                other => panic!("{text}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_file_on_which_the_library_panics_is_refused_by_name() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = TWO_WORDS.replace(r#""decoder": null"#, r#""decoder": x"#);
        std::fs::write(file.path(), text).unwrap();
        match Tokenizer::load(file.path().to_str().unwrap()) {
            Err(DataError::TokenizerFile { text, .. }) => {
                assert!(
                    text.starts_with("the tokenizers library panicked: "),
                    "{text}"
                );
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_missing_file_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        match Tokenizer::load(folder.path().to_str().unwrap()) {
            Err(DataError::Read { path, source }) => {
                assert!(path.ends_with("tokenizer.json"));
                assert_eq!(source.kind(), std::io::ErrorKind::NotFound);
            }
            other => panic!("{other:?}"),
        }
    }
}
