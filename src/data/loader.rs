//! Batches by step number.

use super::batch::{Batch, Sequence};
use super::permutation::Permutation;
use super::source::{DataConfig, Source};
use super::sums::{SequenceNumber, Sums};
use super::validation::{Plan, ValidationBatches};
use super::windows::{WindowOrder, Windows};
use crate::error::DataError;

/// The largest number of tokens in a batch.
const MAXIMUM_TOKENS: usize = i32::MAX as usize;
/// The last epoch; the stream of random numbers after it chooses the sums held out.
const LAST_EPOCH: u32 = u32::MAX - 1;

/// How a source is made into batches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoaderConfig {
    /// The fraction of the windows of a stream for validation, 0 or more and less than 1.
    pub validation: f64,
    /// Sequences in a batch.
    pub batch: usize,
    /// Tokens in a sequence.
    pub seq_len: usize,
    /// The seed of the order and of generated text.
    pub seed: u64,
    /// Tokens are below this number.
    pub vocab_size: usize,
    pub order: WindowOrder,
}

/// Makes the batch of any step. It keeps no position: the caller says which step it wants.
///
/// Row `r` of step `c` is sequence `s = c batch + r` of the run. With `n` training windows it is
/// the window that the order of epoch `s / n` has at place `s % n`. So an epoch may end inside a
/// batch, and every window comes once in each epoch, none left out and none repeated early; a data
/// set smaller than a batch fills it with several epochs. The rows do not depend on how many of
/// them a batch has.
///
/// In consecutive order the training windows are cut into as many parts of `L = floor(n / batch)` windows as
/// a batch has rows, the windows left over at the end being dropped, and row `r` of step `c` is window
/// `r L + c mod L`: after `L` steps every row begins again.
#[derive(Debug)]
pub struct DataLoader {
    feed: Feed,
    config: LoaderConfig,
}

#[derive(Debug)]
enum Feed {
    Sums(Sums),
    Windows(Windows),
}

impl DataLoader {
    /// Opens the source of `config` and makes its batches.
    ///
    /// # Errors
    /// The errors of [`Source::open`] and [`DataLoader::new`].
    pub fn open(config: &DataConfig) -> Result<Self, DataError> {
        check_fraction(config.validation)?;
        check_size(config.batch, config.seq_len)?;
        Self::new(Source::open(config)?, config.loader())
    }

    /// Makes batches of `source`.
    ///
    /// # Errors
    /// [`DataError::BatchSize`] and [`DataError::ValidationFraction`] for sizes and a fraction out
    /// of range; [`DataError::SeqLen`] and [`DataError::VocabSize`] when sums do not fit;
    /// [`DataError::TooShort`], [`DataError::NoTraining`] and [`DataError::TokenInText`] for a
    /// stream that cannot be cut.
    pub fn new(source: Source, config: LoaderConfig) -> Result<Self, DataError> {
        let LoaderConfig {
            seq_len,
            vocab_size,
            validation,
            ..
        } = config;
        check_fraction(validation)?;
        check_size(config.batch, seq_len)?;
        let feed = match source {
            Source::Sums(_) if !config.order.is_shuffled() => {
                return Err(DataError::NoConsecutiveWindows);
            }
            Source::Sums(sums) => {
                sums.check(seq_len, vocab_size)?;
                Feed::Sums(sums)
            }
            Source::Stream(stream) => {
                // Batches hold 32-bit signed tokens.
                let limit = vocab_size.min(1 << 31);
                let windows = Windows::new(stream, seq_len, limit, validation)?;
                let least = match config.order {
                    WindowOrder::Shuffled => 1,
                    WindowOrder::Consecutive => config.batch as u64,
                };
                windows.check_training(least)?;
                Feed::Windows(windows)
            }
        };
        Ok(DataLoader { feed, config })
    }

    /// How the batches are made.
    pub fn config(&self) -> &LoaderConfig {
        &self.config
    }

    /// The number of sequences in an epoch; nothing when sequences have no end.
    pub fn sequences_per_epoch(&self) -> Option<u64> {
        match &self.feed {
            Feed::Sums(_) => None,
            Feed::Windows(windows) => Some(match self.config.order {
                WindowOrder::Shuffled => windows.training_windows(),
                WindowOrder::Consecutive => self.part(windows) * self.config.batch as u64,
            }),
        }
    }

    /// Windows that each row of a batch walks through in consecutive order.
    fn part(&self, windows: &Windows) -> u64 {
        windows.training_windows() / self.config.batch as u64
    }

    /// Whether the rows of step `cursor` go on where those of the step before ended.
    pub fn goes_on(&self, cursor: u64) -> bool {
        match (&self.feed, self.config.order) {
            (Feed::Windows(windows), WindowOrder::Consecutive) => {
                !cursor.is_multiple_of(self.part(windows))
            }
            _ => false,
        }
    }

    /// The batch of step `cursor`, whatever was asked for before.
    ///
    /// # Errors
    /// [`DataError::Cursor`] for a step beyond the last epoch; the errors of reading the source.
    pub fn batch_at(&self, cursor: u64) -> Result<Batch, DataError> {
        let LoaderConfig { batch, seq_len, .. } = self.config;
        let mut sequences = Vec::with_capacity(batch);
        for row in 0..batch as u64 {
            let number = cursor
                .checked_mul(batch as u64)
                .and_then(|first| first.checked_add(row));
            let found = number.and_then(|number| self.place(number));
            let (epoch, position) = found.ok_or(DataError::Cursor {
                cursor,
                batch,
                last_epoch: LAST_EPOCH,
            })?;
            sequences.push(self.sequence(epoch, position)?);
        }
        Ok(Batch::of(seq_len, &sequences))
    }

    /// The epoch of sequence `number` and its position there.
    fn place(&self, number: u64) -> Option<(u32, u64)> {
        let epoch_length = self.sequences_per_epoch().unwrap_or(Sums::EPOCH);
        let epoch = u32::try_from(number / epoch_length).ok()?;
        (epoch <= LAST_EPOCH).then_some((epoch, number % epoch_length))
    }

    fn sequence(&self, epoch: u32, position: u64) -> Result<Sequence, DataError> {
        let LoaderConfig { seq_len, seed, .. } = self.config;
        match &self.feed {
            Feed::Sums(sums) => {
                let at = SequenceNumber {
                    seed,
                    epoch,
                    index: position,
                };
                Ok(sums.training(at, seq_len))
            }
            Feed::Windows(windows) if !self.config.order.is_shuffled() => {
                let batch = self.config.batch as u64;
                windows.training(position % batch * self.part(windows) + position / batch)
            }
            Feed::Windows(windows) => {
                let order = Permutation::new(windows.training_windows(), seed, epoch);
                // The position is a remainder by the number of windows, so it has a window.
                windows.training(order.at(position).unwrap_or(0))
            }
        }
    }

    /// The validation batches of `batch` sequences of `seq_len` tokens, always the same in the same
    /// order. The last batch is filled up with sequences of token 0 whose targets are all ignored.
    ///
    /// # Errors
    /// [`DataError::BatchSize`] for sizes out of range; [`DataError::NoValidation`] when nothing is
    /// set aside; [`DataError::TooShort`] or [`DataError::SeqLen`] when no sequence of this length
    /// can be made. Each batch may be an error of reading the source.
    pub fn validation_batches(
        &self,
        batch: usize,
        seq_len: usize,
    ) -> Result<ValidationBatches<'_>, DataError> {
        check_size(batch, seq_len)?;
        let plan = match &self.feed {
            Feed::Sums(sums) => {
                sums.check(seq_len, self.config.vocab_size)?;
                Plan::Sums(sums, sums.validation_plan(seq_len))
            }
            Feed::Windows(windows) => Plan::Windows(windows, windows.validation_windows(seq_len)?),
        };
        Ok(ValidationBatches::new(plan, batch, seq_len))
    }
}

fn check_fraction(found: f64) -> Result<(), DataError> {
    // A fraction that is not a number is in no range.
    if (0.0..1.0).contains(&found) {
        return Ok(());
    }
    Err(DataError::ValidationFraction { found })
}

fn check_size(batch: usize, seq_len: usize) -> Result<(), DataError> {
    match batch.checked_mul(seq_len) {
        Some(1..=MAXIMUM_TOKENS) => Ok(()),
        _ => Err(DataError::BatchSize {
            batch,
            seq_len,
            maximum: MAXIMUM_TOKENS,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{BinFile, SourceKind, TextTokens, TokenFormat, TokenStream};

    fn config(batch: usize, seq_len: usize) -> LoaderConfig {
        LoaderConfig {
            validation: 0.0,
            batch,
            seq_len,
            seed: 9,
            vocab_size: 1000,
            order: WindowOrder::Shuffled,
        }
    }

    fn consecutive(batch: usize, seq_len: usize) -> LoaderConfig {
        LoaderConfig {
            order: WindowOrder::Consecutive,
            ..config(batch, seq_len)
        }
    }

    fn text(tokens: u32) -> Source {
        let tokens = TextTokens::from_tokens("story", (0..tokens).collect());
        Source::Stream(TokenStream::Text(tokens))
    }

    fn loader(tokens: u32, config: LoaderConfig) -> DataLoader {
        DataLoader::new(text(tokens), config).unwrap()
    }

    fn sums_loader(config: LoaderConfig) -> DataLoader {
        DataLoader::new(Source::Sums(Sums::new()), config).unwrap()
    }

    /// The first tokens of the rows of steps `0..steps`.
    fn first_tokens(loader: &DataLoader, steps: u64) -> Vec<i32> {
        let seq_len = loader.config().seq_len;
        (0..steps)
            .flat_map(|step| loader.batch_at(step).unwrap().input_ids)
            .step_by(seq_len)
            .collect()
    }

    #[test]
    fn an_odd_data_set_gives_every_window_once_an_epoch_across_batch_ends() {
        // Seven windows of four tokens, three rows a step: seven steps are three epochs.
        let loader = loader(30, config(3, 4));
        assert_eq!(loader.sequences_per_epoch(), Some(7));
        let rows = first_tokens(&loader, 7);
        for epoch in rows.chunks(7) {
            let mut sorted = epoch.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 4, 8, 12, 16, 20, 24]);
        }
        assert_ne!(rows[..7], rows[7..14]);
    }

    #[test]
    fn consecutive_rows_go_on_until_their_part_of_the_stream_ends() {
        // Eleven windows of four tokens, three rows a step: parts of three windows, two are left over.
        let loader = loader(45, consecutive(3, 4));
        assert_eq!(loader.sequences_per_epoch(), Some(9));
        let rows = first_tokens(&loader, 4);
        assert_eq!(rows, [0, 12, 24, 4, 16, 28, 8, 20, 32, 0, 12, 24]);
        let goes_on: Vec<bool> = (0..5).map(|step| loader.goes_on(step)).collect();
        assert_eq!(goes_on, [false, true, true, false, true]);
        let shuffled = super::tests::loader(45, config(3, 4));
        assert!((0..5).all(|step| !shuffled.goes_on(step)));
    }

    #[test]
    fn consecutive_windows_need_a_stream_with_one_for_each_row() {
        let refused = DataLoader::new(Source::Sums(Sums::new()), consecutive(2, 32));
        assert!(matches!(refused, Err(DataError::NoConsecutiveWindows)));
        let Err(refused) = DataLoader::new(text(9), consecutive(3, 4)) else {
            panic!("two windows are not enough for three rows");
        };
        assert_eq!(
            refused.to_string(),
            "story: expected a training window for each row of a batch, 3, found 2; lower data.batch or data.seq_len"
        );
    }

    #[test]
    fn a_data_set_smaller_than_a_batch_fills_it_with_several_epochs() {
        let rows = first_tokens(&loader(9, config(6, 4)), 1);
        for epoch in rows.chunks(2) {
            assert!(epoch == [0, 4] || epoch == [4, 0], "{rows:?}");
        }
    }

    #[test]
    fn targets_are_the_next_tokens() {
        let batch = loader(30, config(3, 4)).batch_at(5).unwrap();
        batch.validate(3, 4, 1000).unwrap();
        assert_eq!(batch.active_targets(), 12);
        for (id, target) in batch.input_ids.iter().zip(&batch.targets) {
            assert_eq!(*target, id + 1);
        }
    }

    #[test]
    fn rows_do_not_depend_on_how_many_a_batch_has() {
        for make in [|c| loader(300, c), sums_loader] {
            let whole = make(config(8, 16)).batch_at(3).unwrap();
            for rows in [1, 2, 4] {
                let parts = make(config(rows, 16));
                let steps = (8 / rows) as u64;
                let parts: Vec<Batch> = (3 * steps..4 * steps)
                    .map(|step| parts.batch_at(step).unwrap())
                    .collect();
                let ids: Vec<i32> = parts.iter().flat_map(|b| b.input_ids.clone()).collect();
                let targets: Vec<i32> = parts.iter().flat_map(|b| b.targets.clone()).collect();
                assert_eq!(
                    (ids, targets),
                    (whole.input_ids.clone(), whole.targets.clone())
                );
                let active: usize = parts.iter().map(Batch::active_targets).sum();
                assert_eq!(active, whole.active_targets());
            }
        }
    }

    #[test]
    fn any_step_can_be_asked_for_in_any_order_by_any_thread() {
        let loader = loader(300, config(3, 4));
        let forward: Vec<Batch> = (0..40).map(|step| loader.batch_at(step).unwrap()).collect();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (loader, forward) = (&loader, &forward);
                scope.spawn(move || {
                    for step in (0..40).rev().filter(|step| step % 4 == thread) {
                        let found = loader.batch_at(step).unwrap();
                        assert_eq!(found, forward[step as usize]);
                    }
                });
            }
        });
    }

    #[test]
    fn seeds_differ_and_the_order_is_known() {
        let first = first_tokens(&loader(30, config(7, 4)), 1);
        assert_eq!(first, [16, 24, 8, 12, 20, 4, 0]);
        let other = LoaderConfig {
            seed: 10,
            ..config(7, 4)
        };
        assert_ne!(first, first_tokens(&loader(30, other), 1));
    }

    #[test]
    fn sums_never_end_and_score_answers_alone() {
        let loader = sums_loader(config(4, 32));
        assert_eq!(loader.sequences_per_epoch(), None);
        for step in [0, 1, 1 << 38, (1 << 61) - 1] {
            let batch = loader.batch_at(step).unwrap();
            batch.validate(4, 32, 62).unwrap();
            let active = batch.active_targets();
            assert!((4..64).contains(&active), "{active}");
        }
        let (one, two) = (
            loader.batch_at(0).unwrap(),
            loader.batch_at(1 << 38).unwrap(),
        );
        assert_ne!(one, two);
    }

    #[test]
    fn a_step_beyond_the_last_epoch_is_refused() {
        let one_window = loader(5, config(1, 4));
        let last = u64::from(u32::MAX) - 1;
        one_window.batch_at(last).unwrap();
        for (loader, cursor) in [
            (&one_window, last + 1),
            (&one_window, u64::MAX),
            (&loader(300, config(2, 4)), u64::MAX),
        ] {
            match loader.batch_at(cursor) {
                Err(DataError::Cursor { cursor: found, .. }) => assert_eq!(found, cursor),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn sizes_and_fractions_out_of_range_are_refused() {
        for (batch, seq_len) in [(0, 4), (4, 0), (1 << 16, 1 << 16), (usize::MAX, 2)] {
            let refused = DataLoader::new(text(30), config(batch, seq_len));
            assert!(matches!(refused, Err(DataError::BatchSize { .. })));
            let refused = sums_loader(config(1, 9))
                .validation_batches(batch, seq_len)
                .err();
            assert!(matches!(refused, Some(DataError::BatchSize { .. })));
        }
        for validation in [-0.1, 1.0, f64::NAN, f64::INFINITY] {
            let wrong = LoaderConfig {
                validation,
                ..config(3, 4)
            };
            match DataLoader::new(text(30), wrong) {
                Err(DataError::ValidationFraction { found }) => {
                    assert_eq!(found.to_bits(), validation.to_bits());
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_token_beyond_the_vocabulary_stops_the_step_that_reads_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let tokens: Vec<u8> = (0..9u16)
            .map(|t| t * 200)
            .flat_map(u16::to_le_bytes)
            .collect();
        std::fs::write(file.path(), tokens).unwrap();
        let data = DataConfig {
            source: SourceKind::Bin,
            path: Some(file.path().to_path_buf()),
            tokenizer: None,
            token_format: TokenFormat::U16,
            validation: 0.0,
            batch: 1,
            seq_len: 4,
            seed: 9,
            vocab_size: 1000,
            order: WindowOrder::Shuffled,
        };
        let loader = DataLoader::open(&data).unwrap();
        let results = [0, 1].map(|step| loader.batch_at(step));
        assert_eq!(results.iter().filter(|r| r.is_ok()).count(), 1);
        assert!(results.iter().any(|result| matches!(
            result,
            Err(DataError::TokenInFile {
                offset: 10,
                vocab_size: 1000,
                found: 1000,
                ..
            })
        )));
    }

    #[test]
    fn a_token_that_is_no_signed_number_is_refused_in_any_vocabulary() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [0xFF; 8]).unwrap();
        let stream = TokenStream::Bin(BinFile::open(file.path(), TokenFormat::U32).unwrap());
        let wide = LoaderConfig {
            vocab_size: usize::MAX,
            ..config(1, 1)
        };
        let loader = DataLoader::new(Source::Stream(stream), wide).unwrap();
        assert!(matches!(
            loader.batch_at(0),
            Err(DataError::TokenInFile {
                found: u32::MAX,
                ..
            })
        ));
    }
}
