//! Sums of two numbers below 100 as byte text: the data set that needs no file.

use std::ops::Range;

use super::batch::Sequence;
use crate::error::DataError;
use crate::num::philox::{Philox, Purpose};

/// Operands are in `0..OPERANDS`.
const OPERANDS: u16 = 100;
/// One pair in ten is held out: exactly this many of the 10,000.
const HELD_OUT: usize = 1000;
/// The stream of [`Purpose::DataText`], with seed 0, whose numbers choose the pairs held out. The
/// streams of epochs stay below it.
const HELD_OUT_STREAM: u32 = u32::MAX;
/// The bits of a random index that number the lines of a sequence; the sequence has the rest.
const LINE_BITS: u32 = 24;
/// Bytes of the longest line, `99+99=198` and a newline.
const LONGEST_LINE: usize = 10;

/// The generator of lines `17+58=75`, each ended by a newline.
///
/// Of the 10,000 pairs of operands a tenth is held out for validation. Which ones is the same for
/// every seed, so no run trains on what another one is tested with. The order of operands counts:
/// `58+17` may be trained on when `17+58` is held out. Only the digits of answers and the newline
/// after them are scored.
#[derive(Clone, Debug)]
pub struct Sums {
    /// Pairs as `100 a + b`, ascending.
    training: Vec<u16>,
    /// Pairs as `100 a + b`, in the order of their hash, so that any first part is a fair sample.
    held_out: Vec<u16>,
}

impl Default for Sums {
    fn default() -> Self {
        Self::new()
    }
}

impl Sums {
    /// What messages call this source.
    pub const NAME: &'static str = "sums";
    /// The smallest `seq_len`: a sequence and the token after it hold the longest line, so every
    /// sequence has an answer that is scored.
    pub const SHORTEST: usize = LONGEST_LINE - 1;
    /// The largest `seq_len`: lines of one sequence have distinct numbers.
    pub const LONGEST: usize = 1 << LINE_BITS;
    /// The smallest `vocab_size`: one more than the largest byte of a line, `=`.
    pub const VOCAB_SIZE: usize = b'=' as usize + 1;
    /// Sequences of one epoch. The text does not repeat, so an epoch is only a numbering.
    pub const EPOCH: u64 = 1 << (u64::BITS - LINE_BITS);

    /// The generator; builds the two lists of pairs.
    pub fn new() -> Self {
        let hash = Philox::new(0, Purpose::DataText, HELD_OUT_STREAM);
        let mut pairs: Vec<u16> = (0..OPERANDS * OPERANDS).collect();
        pairs.sort_by_cached_key(|&pair| (hash.block(u64::from(pair)), pair));
        let mut training = pairs.split_off(HELD_OUT);
        training.sort_unstable();
        Sums {
            training,
            held_out: pairs,
        }
    }

    /// The pairs that training never sees, as prompt `17+58=` and answer `75`, in a fixed order.
    pub fn held_out(&self) -> impl Iterator<Item = (String, String)> {
        self.held_out.iter().map(|&pair| prompt_and_answer(pair))
    }

    pub(super) fn check(&self, seq_len: usize, vocab_size: usize) -> Result<(), DataError> {
        let name = Self::NAME.to_string();
        if !(Self::SHORTEST..=Self::LONGEST).contains(&seq_len) {
            return Err(DataError::SeqLen {
                name,
                minimum: Self::SHORTEST,
                maximum: Self::LONGEST,
                found: seq_len,
            });
        }
        if vocab_size < Self::VOCAB_SIZE {
            return Err(DataError::VocabSize {
                name,
                minimum: Self::VOCAB_SIZE,
                found: vocab_size,
            });
        }
        Ok(())
    }

    /// Training sequence `index` of `epoch`: lines from the first on, the last one cut where the
    /// sequence ends. `index` is below [`Sums::EPOCH`] and `epoch` below `u32::MAX`.
    pub(super) fn training(&self, at: SequenceNumber, seq_len: usize) -> Sequence {
        let numbers = Philox::new(at.seed, Purpose::DataText, at.epoch);
        let mut text = Text::new(seq_len);
        let mut line = at.index << LINE_BITS;
        while !text.full() {
            let chosen = numbers.below(line, self.training.len() as u64);
            text.push(self.training[chosen as usize]);
            line += 1;
        }
        text.sequence()
    }

    /// The held-out pairs of each validation sequence: as many whole lines as fit, so that every
    /// pair is scored once.
    pub(super) fn validation_plan(&self, seq_len: usize) -> Vec<Range<usize>> {
        let mut plan = Vec::new();
        let (mut start, mut filled) = (0, 0);
        for (i, &pair) in self.held_out.iter().enumerate() {
            let length = line_bytes(pair);
            if filled + length > seq_len + 1 {
                plan.push(start..i);
                (start, filled) = (i, 0);
            }
            filled += length;
        }
        plan.push(start..self.held_out.len());
        plan
    }

    /// The validation sequence of some held-out pairs; what is left of it is padding.
    pub(super) fn validation(&self, pairs: Range<usize>, seq_len: usize) -> Sequence {
        let mut text = Text::new(seq_len);
        for &pair in &self.held_out[pairs] {
            text.push(pair);
        }
        text.sequence()
    }
}

/// Which generated sequence: with the length, all that its bytes depend on.
#[derive(Clone, Copy, Debug)]
pub(super) struct SequenceNumber {
    pub seed: u64,
    pub epoch: u32,
    pub index: u64,
}

fn prompt_and_answer(pair: u16) -> (String, String) {
    let (a, b) = (pair / OPERANDS, pair % OPERANDS);
    (format!("{a}+{b}="), (a + b).to_string())
}

fn line_bytes(pair: u16) -> usize {
    let (prompt, answer) = prompt_and_answer(pair);
    prompt.len() + answer.len() + 1
}

/// `seq_len + 1` bytes being filled with lines.
struct Text {
    end: usize,
    sequence: Sequence,
}

impl Text {
    fn new(seq_len: usize) -> Self {
        let end = seq_len + 1;
        // The last line may pass the end before it is cut.
        let capacity = end + LONGEST_LINE;
        let sequence = Sequence {
            tokens: Vec::with_capacity(capacity),
            scored: Vec::with_capacity(capacity),
        };
        Text { end, sequence }
    }

    fn full(&self) -> bool {
        self.sequence.tokens.len() >= self.end
    }

    fn push(&mut self, pair: u16) {
        let (prompt, answer) = prompt_and_answer(pair);
        for (text, scored) in [
            (prompt.as_str(), false),
            (answer.as_str(), true),
            ("\n", true),
        ] {
            self.sequence.tokens.extend(text.bytes().map(u32::from));
            self.sequence
                .scored
                .resize(self.sequence.tokens.len(), scored);
        }
    }

    fn sequence(mut self) -> Sequence {
        self.sequence.tokens.resize(self.end, 0);
        self.sequence.scored.resize(self.end, false);
        self.sequence
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn at(seed: u64, epoch: u32, index: u64) -> SequenceNumber {
        SequenceNumber { seed, epoch, index }
    }

    fn text(sequence: &Sequence) -> String {
        sequence.tokens.iter().map(|&t| t as u8 as char).collect()
    }

    #[test]
    fn exactly_a_tenth_is_held_out_and_the_rest_is_trained_on() {
        let sums = Sums::new();
        assert_eq!((sums.held_out.len(), sums.training.len()), (1000, 9000));
        let mut all = [sums.held_out, sums.training].concat();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..10_000));
    }

    #[test]
    fn held_out_pairs_are_sums_in_a_fixed_order() {
        let sums = Sums::new();
        let pairs: Vec<_> = sums.held_out().collect();
        assert_eq!(pairs.len(), 1000);
        for (prompt, answer) in &pairs {
            let (a, b) = prompt.strip_suffix('=').unwrap().split_once('+').unwrap();
            let sum = a.parse::<u32>().unwrap() + b.parse::<u32>().unwrap();
            assert_eq!(*answer, sum.to_string());
        }
        let first: Vec<_> = pairs[..3].iter().map(|(p, a)| format!("{p}{a}")).collect();
        assert_eq!(first, ["81+68=149", "75+73=148", "19+41=60"]);
    }

    #[test]
    fn training_never_shows_a_held_out_pair() {
        let sums = Sums::new();
        let held_out: HashSet<String> = sums.held_out().map(|(p, a)| p + &a).collect();
        let mut seen = HashSet::new();
        for index in 0..2000 {
            let text = text(&sums.training(at(5, 0, index), 200));
            let (whole_lines, _cut) = text.rsplit_once('\n').unwrap();
            seen.extend(whole_lines.lines().map(str::to_string));
        }
        assert!(seen.is_disjoint(&held_out));
        // 40,000 draws of 9,000 pairs leave out about a hundred of them.
        assert!(seen.len() > 8500 && seen.len() <= 9000, "{}", seen.len());
    }

    #[test]
    fn only_answers_and_their_newlines_are_scored() {
        let sums = Sums::new();
        for index in 0..50 {
            let sequence = sums.training(at(3, 1, index), 40);
            assert_eq!((sequence.tokens.len(), sequence.scored.len()), (41, 41));
            let mut in_answer = false;
            for (&token, &scored) in sequence.tokens.iter().zip(&sequence.scored) {
                assert_eq!(scored, in_answer, "{}", text(&sequence));
                in_answer = match token as u8 {
                    b'=' => true,
                    b'\n' => false,
                    _ => in_answer,
                };
            }
        }
    }

    #[test]
    fn the_shortest_sequences_score_an_answer() {
        let sums = Sums::new();
        for index in 0..500 {
            let sequence = sums.training(at(1, 0, index), Sums::SHORTEST);
            assert!(sequence.scored.contains(&true));
        }
        for pairs in sums.validation_plan(Sums::SHORTEST) {
            assert_eq!(pairs.len(), 1);
        }
    }

    #[test]
    fn sequences_depend_on_seed_epoch_and_index_alone() {
        let sums = Sums::new();
        let first = sums.training(at(1, 0, 0), 64);
        assert_eq!(first, Sums::new().training(at(1, 0, 0), 64));
        for other in [at(2, 0, 0), at(1, 1, 0), at(1, 0, 1)] {
            assert_ne!(first, sums.training(other, 64));
        }
        // A longer sequence begins with the shorter one.
        let longer = sums.training(at(1, 0, 0), 100);
        assert_eq!(first.tokens, longer.tokens[..65]);
        let lines = [
            "67+21=88",
            "44+38=82",
            "49+6=55",
            "24+10=34",
            "8+63=71",
            "84+43=127",
            "28+23=51",
            "67+",
        ];
        assert_eq!(text(&first), lines.join("\n"));
    }

    #[test]
    fn validation_scores_every_held_out_answer_once() {
        let sums = Sums::new();
        let expected: String = sums.held_out().map(|(p, a)| p + &a + "\n").collect();
        let mut found = String::new();
        let mut scored = 0;
        for pairs in sums.validation_plan(33) {
            let sequence = sums.validation(pairs, 33);
            assert_eq!(sequence.tokens.len(), 34);
            found += text(&sequence).trim_end_matches('\0');
            scored += sequence.scored.iter().filter(|&&s| s).count();
        }
        assert_eq!(found, expected);
        let answers: usize = sums.held_out().map(|(_, a)| a.len() + 1).sum();
        assert_eq!(scored, answers);
    }

    #[test]
    fn lengths_and_vocabularies_that_cannot_hold_lines_are_refused() {
        let sums = Sums::new();
        sums.check(9, 62).unwrap();
        sums.check(1 << 24, 256).unwrap();
        for bad in [0, 8, (1 << 24) + 1] {
            match sums.check(bad, 256) {
                Err(DataError::SeqLen { found, .. }) => assert_eq!(found, bad),
                other => panic!("{bad}: {other:?}"),
            }
        }
        assert!(matches!(
            sums.check(9, 61),
            Err(DataError::VocabSize {
                minimum: 62,
                found: 61,
                ..
            })
        ));
    }
}
