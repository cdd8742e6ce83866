//! A stream of tokens cut into windows, and the split of them for validation.

use serde::{Deserialize, Serialize};

use super::batch::Sequence;
use super::source::TokenStream;
use crate::error::DataError;

/// Which window follows which.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WindowOrder {
    /// Every epoch in an order of its own.
    #[default]
    Shuffled,
    /// The rows of a batch walk through a part of the stream each, window after window, for models that carry a
    /// state from one to the next.
    Consecutive,
}

impl WindowOrder {
    /// Whether it is what a recipe that says nothing has.
    pub fn is_shuffled(&self) -> bool {
        *self == WindowOrder::Shuffled
    }
}

/// The windows of a stream.
///
/// A stream of `N` tokens has `W = (N - 1) / seq_len` windows of `seq_len + 1` tokens, each
/// beginning with the token that the one before ends with: that token is predicted once and read
/// once. The tokens left over at the end are dropped.
///
/// With a validation fraction `f`, `V = floor(f W)` windows are for validation. Training has as
/// many windows as fit before the last `V seq_len + 1` tokens, and validation begins right after
/// the last token of training, so no token belongs to both.
#[derive(Debug)]
pub(super) struct Windows {
    stream: TokenStream,
    seq_len: usize,
    vocab_size: usize,
    fraction: f64,
    all: u64,
    training: u64,
    /// The first token of validation; the end of the stream when there is none.
    validation_start: u64,
}

/// Validation windows of one length.
#[derive(Clone, Copy, Debug)]
pub(super) struct ValidationWindows {
    start: u64,
    seq_len: usize,
    pub count: u64,
}

impl Windows {
    /// Cuts `stream`. `seq_len` is at least 1, `fraction` at least 0 and below 1.
    pub fn new(
        stream: TokenStream,
        seq_len: usize,
        vocab_size: usize,
        fraction: f64,
    ) -> Result<Self, DataError> {
        let (tokens, length) = (stream.tokens(), seq_len as u64);
        if tokens < length + 1 {
            return Err(too_short(&stream, length + 1));
        }
        let all = (tokens - 1) / length;
        let validation = (all as f64 * fraction) as u64;
        let (training, validation_start) = match validation {
            0 => (all, tokens),
            _ => {
                let left = tokens.saturating_sub(validation * length + 2);
                let training = left / length;
                (training, training * length + 1)
            }
        };
        if training == 0 {
            return Err(DataError::NoTraining {
                path: stream.name().to_string(),
                windows: all,
                validation,
            });
        }
        let cut = Windows {
            stream,
            seq_len,
            vocab_size,
            fraction,
            all,
            training,
            validation_start,
        };
        cut.check_text()?;
        Ok(cut)
    }

    /// A text in memory is checked at once; a file may be too large, and is checked as it is read.
    fn check_text(&self) -> Result<(), DataError> {
        match &self.stream {
            TokenStream::Text(text) => text
                .read(0, text.tokens().len(), self.vocab_size)
                .map(|_| ()),
            TokenStream::Bin(_) => Ok(()),
        }
    }

    /// The number of training windows.
    pub fn training_windows(&self) -> u64 {
        self.training
    }

    /// Checks that there are at least so many training windows.
    pub fn check_training(&self, expected: u64) -> Result<(), DataError> {
        match self.training >= expected {
            true => Ok(()),
            false => Err(DataError::FewWindows {
                path: self.stream.name().to_string(),
                expected,
                found: self.training,
            }),
        }
    }

    /// Training window `index`.
    pub fn training(&self, index: u64) -> Result<Sequence, DataError> {
        self.read(index * self.seq_len as u64, self.seq_len)
    }

    /// The validation windows for sequences of `seq_len` tokens, which need not be the length of
    /// training. `seq_len` is at least 1.
    pub fn validation_windows(&self, seq_len: usize) -> Result<ValidationWindows, DataError> {
        let tokens = self.stream.tokens() - self.validation_start;
        if tokens == 0 {
            return Err(DataError::NoValidation {
                path: self.stream.name().to_string(),
                windows: self.all,
                fraction: self.fraction,
            });
        }
        let count = (tokens - 1) / seq_len as u64;
        if count == 0 {
            let expected = self.validation_start + seq_len as u64 + 1;
            return Err(too_short(&self.stream, expected));
        }
        Ok(ValidationWindows {
            start: self.validation_start,
            seq_len,
            count,
        })
    }

    /// Window `index` of `of`.
    pub fn validation(&self, of: ValidationWindows, index: u64) -> Result<Sequence, DataError> {
        self.read(of.start + index * of.seq_len as u64, of.seq_len)
    }

    fn read(&self, start: u64, seq_len: usize) -> Result<Sequence, DataError> {
        let tokens = self.stream.read(start, seq_len + 1, self.vocab_size)?;
        let scored = vec![true; tokens.len()];
        Ok(Sequence { tokens, scored })
    }
}

fn too_short(stream: &TokenStream, expected: u64) -> DataError {
    DataError::TooShort {
        path: stream.name().to_string(),
        expected,
        found: stream.tokens(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::data::{BinFile, TextTokens, TokenFormat};

    fn cut(tokens: u32, seq_len: usize, fraction: f64) -> Result<Windows, DataError> {
        let text = TextTokens::from_tokens("story", (0..tokens).collect());
        Windows::new(TokenStream::Text(text), seq_len, 1 << 31, fraction)
    }

    fn validation(windows: &Windows, seq_len: usize) -> Vec<Vec<u32>> {
        let of = windows.validation_windows(seq_len).unwrap();
        (0..of.count)
            .map(|i| windows.validation(of, i).unwrap().tokens)
            .collect()
    }

    #[test]
    fn the_remainder_is_dropped() {
        for (tokens, count) in [(5, 1), (8, 1), (9, 2), (12, 2), (13, 3)] {
            let windows = cut(tokens, 4, 0.0).unwrap();
            assert_eq!(windows.training_windows(), count, "{tokens} tokens");
        }
        let windows = cut(9, 4, 0.0).unwrap();
        assert_eq!(windows.training(0).unwrap().tokens, [0, 1, 2, 3, 4]);
        assert_eq!(windows.training(1).unwrap().tokens, [4, 5, 6, 7, 8]);
    }

    #[test]
    fn an_empty_or_short_stream_is_refused() {
        for tokens in [0, 1, 4] {
            match cut(tokens, 4, 0.0) {
                Err(DataError::TooShort {
                    path,
                    expected: 5,
                    found,
                }) => {
                    assert_eq!((path.as_str(), found), ("story", u64::from(tokens)));
                }
                other => panic!("{other:?}"),
            }
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        let empty = BinFile::open(file.path(), TokenFormat::U16).unwrap();
        assert!(matches!(
            Windows::new(TokenStream::Bin(empty), 4, 10, 0.0),
            Err(DataError::TooShort { found: 0, .. })
        ));
    }

    #[test]
    fn validation_is_the_end_and_shares_no_token() {
        // Ten windows and no remainder: one is lost between the two parts.
        let windows = cut(41, 4, 0.2).unwrap();
        assert_eq!(windows.training_windows(), 7);
        assert_eq!(windows.training(6).unwrap().tokens, [24, 25, 26, 27, 28]);
        assert_eq!(
            validation(&windows, 4),
            [[29, 30, 31, 32, 33], [33, 34, 35, 36, 37]]
        );
        // With a remainder none is lost.
        let windows = cut(42, 4, 0.2).unwrap();
        assert_eq!(windows.training_windows(), 8);
        assert_eq!(validation(&windows, 4).len(), 2);
        // Another length cuts the same tokens.
        assert_eq!(validation(&windows, 8), [(33..42).collect::<Vec<_>>()]);
    }

    #[test]
    fn a_split_that_leaves_nothing_is_refused() {
        assert!(matches!(
            cut(9, 4, 0.5),
            Err(DataError::NoTraining {
                windows: 2,
                validation: 1,
                ..
            })
        ));
        for fraction in [0.0, 0.49] {
            let windows = cut(9, 4, fraction).unwrap();
            assert!(matches!(
                windows.validation_windows(4),
                Err(DataError::NoValidation { windows: 2, .. })
            ));
        }
        assert!(matches!(
            cut(42, 4, 0.2).unwrap().validation_windows(9),
            Err(DataError::TooShort {
                expected: 43,
                found: 42,
                ..
            })
        ));
    }

    #[test]
    fn a_text_with_a_token_beyond_the_vocabulary_is_refused_at_once() {
        let text = TextTokens::from_tokens("story", (0..20).collect());
        assert!(matches!(
            Windows::new(TokenStream::Text(text), 4, 19, 0.0),
            Err(DataError::TokenInText {
                index: 19,
                found: 19,
                ..
            })
        ));
    }

    proptest! {
        #[test]
        fn splits_are_disjoint_and_of_the_stated_size(
            tokens in 2u32..400, seq_len in 1usize..9, fraction in 0.0..0.9,
        ) {
            let Ok(windows) = cut(tokens, seq_len, fraction) else {
                return Ok(());
            };
            let all = (u64::from(tokens) - 1) / seq_len as u64;
            let stated = (all as f64 * fraction) as usize;
            let last = windows.training(windows.training_windows() - 1).unwrap();
            if stated > 0 {
                let found = validation(&windows, seq_len);
                prop_assert_eq!(found.len(), stated);
                prop_assert_eq!(found[0][0], last.tokens[seq_len] + 1);
                prop_assert!(windows.training_windows() + stated as u64 + 1 >= all);
            } else {
                prop_assert_eq!(windows.training_windows(), all);
            }
        }
    }
}
