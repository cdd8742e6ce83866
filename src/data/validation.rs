//! Batches that training never sees.

use std::ops::Range;

use super::batch::{Batch, Sequence};
use super::sums::Sums;
use super::windows::{ValidationWindows, Windows};
use crate::error::DataError;

/// The validation batches of a loader.
#[derive(Debug)]
pub struct ValidationBatches<'a> {
    plan: Plan<'a>,
    batch: usize,
    seq_len: usize,
    /// The first sequence of the next batch.
    next: u64,
}

/// Which sequences validation has.
#[derive(Debug)]
pub(super) enum Plan<'a> {
    Sums(&'a Sums, Vec<Range<usize>>),
    Windows(&'a Windows, ValidationWindows),
}

impl<'a> ValidationBatches<'a> {
    /// The batches of `plan`; `batch` and `seq_len` are at least 1.
    pub(super) fn new(plan: Plan<'a>, batch: usize, seq_len: usize) -> Self {
        ValidationBatches {
            plan,
            batch,
            seq_len,
            next: 0,
        }
    }

    /// The number of sequences that are not padding.
    pub fn sequences(&self) -> u64 {
        match &self.plan {
            Plan::Sums(_, plan) => plan.len() as u64,
            Plan::Windows(_, windows) => windows.count,
        }
    }

    fn sequence(&self, index: u64) -> Result<Sequence, DataError> {
        if index >= self.sequences() {
            return Ok(Sequence::padding(self.seq_len));
        }
        match &self.plan {
            Plan::Sums(sums, plan) => {
                Ok(sums.validation(plan[index as usize].clone(), self.seq_len))
            }
            Plan::Windows(windows, of) => windows.validation(*of, index),
        }
    }
}

impl Iterator for ValidationBatches<'_> {
    type Item = Result<Batch, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.next >= self.sequences() {
            return None;
        }
        let rows = self.next..self.next + self.batch as u64;
        self.next = rows.end;
        let sequences: Result<Vec<_>, _> = rows.map(|index| self.sequence(index)).collect();
        Some(sequences.map(|sequences| Batch::of(self.seq_len, &sequences)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{
        DataLoader, IGNORE, LoaderConfig, Source, TextTokens, TokenStream, WindowOrder,
    };

    fn config(batch: usize, seq_len: usize) -> LoaderConfig {
        LoaderConfig {
            validation: 0.5,
            batch,
            seq_len,
            seed: 9,
            vocab_size: 1000,
            order: WindowOrder::Shuffled,
        }
    }

    #[test]
    fn the_last_validation_batch_is_padded_with_ignored_targets() {
        let text = TextTokens::from_tokens("story", (0..42).collect());
        let source = Source::Stream(TokenStream::Text(text));
        let loader = DataLoader::new(source, config(3, 4)).unwrap();
        let batches = loader.validation_batches(3, 4).unwrap();
        assert_eq!(batches.sequences(), 5);
        let batches: Vec<Batch> = batches.map(Result::unwrap).collect();
        assert_eq!(batches.len(), 2);
        assert_eq!(batches[0].input_ids, (21..33).collect::<Vec<_>>());
        let last = &batches[1];
        last.validate(3, 4, 42).unwrap();
        assert_eq!(last.input_ids, [33, 34, 35, 36, 37, 38, 39, 40, 0, 0, 0, 0]);
        assert_eq!(last.targets[..8], (34..42).collect::<Vec<_>>());
        assert_eq!(last.targets[8..], [IGNORE; 4]);
        assert_eq!(last.active_targets(), 8);
    }

    #[test]
    fn validation_scores_the_same_targets_in_batches_of_any_size() {
        let loader = DataLoader::new(Source::Sums(Sums::new()), config(4, 32)).unwrap();
        let active = |batch| -> usize {
            let batches = loader.validation_batches(batch, 32).unwrap();
            batches.map(|b| b.unwrap().active_targets()).sum()
        };
        let sums = Sums::new();
        let answers = sums.held_out().map(|(_, answer)| answer.len() + 1);
        let expected: usize = answers.sum();
        for batch in [1, 2, 3, 7, 64] {
            assert_eq!(active(batch), expected);
        }
    }
}
