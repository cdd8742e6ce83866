//! One micro-batch of token sequences, as the step takes it.

use crate::error::DataError;

pub use crate::op::cross_entropy::IGNORE;

/// Token sequences with their targets and weights; every vector is row-major `[batch, seq_len]`.
///
/// Targets are aligned: `targets[t]` is the token that the model predicts from position `t`, and
/// nothing shifts them later.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// The number of sequences.
    pub batch: usize,
    /// The number of tokens in each sequence.
    pub seq_len: usize,
    /// The tokens read, `[batch, seq_len]`.
    pub input_ids: Vec<i32>,
    /// The tokens to predict, `[batch, seq_len]`; [`IGNORE`] where nothing is scored.
    pub targets: Vec<i32>,
    /// What the loss of each position is multiplied by, `[batch, seq_len]`; 1 by default.
    pub weights: Vec<f32>,
    /// What the summed loss is divided by; `None` for the number of scored targets.
    pub normaliser: Option<f64>,
}

/// One sequence and the token after it: `seq_len + 1` tokens, and for each whether it is scored
/// when it is predicted.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sequence {
    pub tokens: Vec<u32>,
    pub scored: Vec<bool>,
}

impl Sequence {
    /// A sequence that takes a place in a batch and is not scored: token 0 throughout.
    pub fn padding(seq_len: usize) -> Self {
        Sequence {
            tokens: vec![0; seq_len + 1],
            scored: vec![false; seq_len + 1],
        }
    }
}

impl Batch {
    /// A batch of sequences of `seq_len + 1` tokens below 2^31, each weight 1.
    pub(super) fn of(seq_len: usize, sequences: &[Sequence]) -> Self {
        let positions = sequences.len() * seq_len;
        let mut made = Batch {
            batch: sequences.len(),
            seq_len,
            input_ids: Vec::with_capacity(positions),
            targets: Vec::with_capacity(positions),
            weights: vec![1.0; positions],
            normaliser: None,
        };
        for sequence in sequences {
            let ids = sequence.tokens.iter().map(|&token| token as i32);
            made.input_ids.extend(ids.clone().take(seq_len));
            let scored = sequence.scored.iter().skip(1);
            let targets = ids.skip(1).zip(scored).take(seq_len);
            made.targets
                .extend(targets.map(|(id, &scored)| if scored { id } else { IGNORE }));
        }
        made
    }

    /// Checks that the batch fits a program for `batch` sequences of `seq_len` tokens and a
    /// vocabulary of `vocab_size`; changes nothing.
    ///
    /// # Errors
    /// [`DataError::BatchShape`] or [`DataError::BatchLength`] for wrong sizes;
    /// [`DataError::InputId`], [`DataError::Target`] or [`DataError::Weight`] with the first
    /// position, in row-major order, whose token, target or weight is out of range.
    pub fn validate(
        &self,
        batch: usize,
        seq_len: usize,
        vocab_size: usize,
    ) -> Result<(), DataError> {
        let (expected, found) = ([batch, seq_len], [self.batch, self.seq_len]);
        if expected != found {
            return Err(DataError::BatchShape { expected, found });
        }
        self.validate_lengths()?;
        let in_vocabulary = |id: i32| usize::try_from(id).is_ok_and(|id| id < vocab_size);
        for position in 0..self.input_ids.len() {
            let (row, column) = (position / seq_len, position % seq_len);
            let (id, target) = (self.input_ids[position], self.targets[position]);
            if !in_vocabulary(id) {
                return Err(DataError::InputId {
                    row,
                    column,
                    vocab_size,
                    found: id,
                });
            }
            if target != IGNORE && !in_vocabulary(target) {
                return Err(DataError::Target {
                    row,
                    column,
                    vocab_size,
                    found: target,
                });
            }
            let weight = self.weights[position];
            if !weight.is_finite() {
                return Err(DataError::Weight {
                    row,
                    column,
                    found: weight,
                });
            }
        }
        Ok(())
    }

    fn validate_lengths(&self) -> Result<(), DataError> {
        let fields = [
            ("input_ids", self.input_ids.len()),
            ("targets", self.targets.len()),
            ("weights", self.weights.len()),
        ];
        // Sizes whose product does not fit cannot be the length of any vector.
        let expected = self.batch.saturating_mul(self.seq_len);
        match fields.into_iter().find(|&(_, found)| found != expected) {
            None => Ok(()),
            Some((field, found)) => Err(DataError::BatchLength {
                field,
                expected,
                found,
            }),
        }
    }

    /// Some of the sequences as a batch of their own, whose losses are divided by this batch's normaliser.
    pub fn sequences(&self, range: std::ops::Range<usize>) -> Batch {
        let tokens = range.start * self.seq_len..range.end * self.seq_len;
        Batch {
            batch: range.len(),
            seq_len: self.seq_len,
            input_ids: self.input_ids[tokens.clone()].to_vec(),
            targets: self.targets[tokens.clone()].to_vec(),
            weights: self.weights[tokens].to_vec(),
            normaliser: Some(self.normaliser()),
        }
    }

    /// The BLAKE3 of tokens, targets and weights.
    pub fn digest(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        hasher.update(bytemuck::cast_slice(&self.input_ids));
        hasher.update(bytemuck::cast_slice(&self.targets));
        hasher.update(bytemuck::cast_slice(&self.weights));
        hasher.finalize()
    }

    /// What the summed loss is divided by: the caller's own number, or that of the scored targets.
    pub fn normaliser(&self) -> f64 {
        self.normaliser.unwrap_or(self.active_targets() as f64)
    }

    /// The number of targets that are not ignored; a weight of 0 does not make one ignored.
    pub fn active_targets(&self) -> usize {
        self.targets
            .iter()
            .filter(|&&target| target != IGNORE)
            .count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_by_three() -> Batch {
        Batch {
            batch: 2,
            seq_len: 3,
            input_ids: vec![0, 1, 2, 3, 4, 5],
            targets: vec![1, 2, IGNORE, 4, IGNORE, 0],
            weights: vec![1.0, -2.5, 0.0, 1.0, 1.0, 0.0],
            normaliser: None,
        }
    }

    #[test]
    fn a_batch_that_fits_passes_unchanged() {
        let batch = two_by_three();
        batch.validate(2, 3, 6).unwrap();
        assert_eq!(batch, two_by_three());
    }

    #[test]
    fn ignored_targets_are_not_counted_and_weights_do_not_count() {
        let mut batch = two_by_three();
        assert_eq!(batch.active_targets(), 4);
        batch.weights = vec![0.0; 6];
        assert_eq!(batch.active_targets(), 4);
        batch.targets = vec![IGNORE; 6];
        assert_eq!(batch.active_targets(), 0);
        batch.validate(2, 3, 6).unwrap();
    }

    #[test]
    fn another_shape_is_refused() {
        assert!(matches!(
            two_by_three().validate(3, 2, 6),
            Err(DataError::BatchShape {
                expected: [3, 2],
                found: [2, 3]
            })
        ));
    }

    #[test]
    fn a_vector_of_another_length_is_refused_by_name() {
        for name in ["input_ids", "targets", "weights"] {
            let mut batch = two_by_three();
            match name {
                "input_ids" => batch.input_ids.push(0),
                "targets" => batch.targets.push(0),
                _ => batch.weights.push(0.0),
            }
            match batch.validate(2, 3, 6) {
                Err(DataError::BatchLength {
                    field,
                    expected: 6,
                    found: 7,
                }) => assert_eq!(field, name),
                other => panic!("{name}: {other:?}"),
            }
        }
    }

    #[test]
    fn sizes_whose_product_overflows_are_refused() {
        let mut batch = two_by_three();
        (batch.batch, batch.seq_len) = (usize::MAX, 2);
        assert!(matches!(
            batch.validate(usize::MAX, 2, 6),
            Err(DataError::BatchLength { .. })
        ));
    }

    #[test]
    fn a_token_outside_the_vocabulary_is_refused_with_its_position() {
        for bad in [6, -1, IGNORE, i32::MIN] {
            let mut batch = two_by_three();
            batch.input_ids[4] = bad;
            match batch.validate(2, 3, 6) {
                Err(DataError::InputId {
                    row: 1,
                    column: 1,
                    vocab_size: 6,
                    found,
                }) => assert_eq!(found, bad),
                other => panic!("{bad}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_target_outside_the_vocabulary_is_refused_with_its_position() {
        for bad in [6, -1, -99, -101] {
            let mut batch = two_by_three();
            batch.targets[2] = bad;
            match batch.validate(2, 3, 6) {
                Err(DataError::Target {
                    row: 0,
                    column: 2,
                    vocab_size: 6,
                    found,
                }) => assert_eq!(found, bad),
                other => panic!("{bad}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_weight_that_is_not_finite_is_refused_even_where_it_is_ignored() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut batch = two_by_three();
            batch.weights[2] = bad;
            match batch.validate(2, 3, 6) {
                Err(DataError::Weight {
                    row: 0,
                    column: 2,
                    found,
                }) => assert_eq!(found.to_bits(), bad.to_bits()),
                other => panic!("{bad}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_target_is_the_next_token_where_that_one_is_scored() {
        let sequence = Sequence {
            tokens: vec![5, 6, 7, 8],
            scored: vec![true, false, true, true],
        };
        let batch = Batch::of(3, &[sequence, Sequence::padding(3)]);
        assert_eq!(batch.input_ids, [5, 6, 7, 0, 0, 0]);
        assert_eq!(batch.targets, [IGNORE, 7, 8, IGNORE, IGNORE, IGNORE]);
        assert_eq!(batch.weights, [1.0; 6]);
        batch.validate(2, 3, 9).unwrap();
    }
}
