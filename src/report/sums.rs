//! How many of the sums held out a model answers, and some of its answers.

use crate::backend::Backend;
use crate::data::{Batch, IGNORE, Sums};
use crate::engine::Trainer;
use crate::engine::generate::{Request, Sampling, generate};
use crate::error::Error;

/// Digits and newline of the longest answer.
const LONGEST_ANSWER: usize = 4;

/// The score on the sums held out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SumsScore {
    /// Sums whose every digit, and the newline after them, is right.
    pub right: usize,
    /// Sums that were asked.
    pub total: usize,
}

impl std::fmt::Display for SumsScore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let SumsScore { right, total } = self;
        let percent = 100.0 * *right as f64 / (*total).max(1) as f64;
        write!(f, "{right}/{total} right ({percent:.1} %)")
    }
}

/// A model's own answer to a sum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The prompt, such as `17+58=`.
    pub prompt: String,
    /// What the model wrote before its newline.
    pub found: String,
    pub expected: String,
}

/// Asks every sum held out, a sequence each. An answer is right when at each of its positions the
/// right token is the first with the greatest logit; that is the answer greedy decoding gives, since up to its
/// first mistake both have seen the same tokens.
///
/// # Errors
/// A vocabulary without the bytes of sums; a device fault.
pub fn score<B: Backend>(trainer: &mut Trainer<B>) -> Result<SumsScore, Error> {
    let inputs = &trainer.session().plan().inputs;
    let (batch, seq_len) = (inputs.batch, inputs.seq_len);
    let pairs: Vec<(String, String)> = Sums::new().held_out().collect();
    let mut right = 0;
    for asked in pairs.chunks(batch) {
        let questions = questions(asked, [batch, seq_len]);
        let vocab_size = trainer.session().plan().vocab_size;
        let logits = trainer.logits(&questions)?;
        let rows = logits.chunks(seq_len * vocab_size);
        right += questions
            .targets
            .chunks(seq_len)
            .zip(rows)
            .take(asked.len())
            .filter(|(targets, logits)| {
                let tokens = targets.iter().zip(logits.chunks(vocab_size));
                let mut scored = tokens.filter(|(target, _)| **target != IGNORE);
                scored.all(|(target, row)| greatest(row) == Some(*target as usize))
            })
            .count();
    }
    Ok(SumsScore {
        right,
        total: pairs.len(),
    })
}

/// The first index of the greatest logit: what greedy decoding takes, also where several are equal.
fn greatest(row: &[f32]) -> Option<usize> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    row.iter().position(|&x| x == max)
}

/// The model's greedy answers to the first sums held out.
///
/// # Errors
/// As [`score`].
pub fn answers<B: Backend>(trainer: &mut Trainer<B>, count: usize) -> Result<Vec<Answer>, Error> {
    let seq_len = trainer.session().plan().inputs.seq_len;
    let asked = Sums::new().held_out().take(count).collect::<Vec<_>>();
    let mut answers = Vec::new();
    for (prompt, expected) in asked {
        let tokens: Vec<u32> = prompt.bytes().map(u32::from).collect();
        let request = Request {
            tokens: LONGEST_ANSWER.min(seq_len.saturating_sub(tokens.len())),
            eos: vec![u32::from(b'\n')],
            sampling: Sampling::GREEDY,
        };
        let continuation = generate(trainer, &tokens, &request)?;
        let bytes = continuation.tokens.iter().map(|&t| t as u8 as char);
        answers.push(Answer {
            prompt,
            found: bytes.collect::<String>().escape_default().to_string(),
            expected,
        });
    }
    Ok(answers)
}

/// A batch of one sum a sequence; digits of answers and the newline are scored, the rest is padding.
fn questions(asked: &[(String, String)], [batch, seq_len]: [usize; 2]) -> Batch {
    let positions = batch * seq_len;
    let mut made = Batch {
        batch,
        seq_len,
        input_ids: vec![0; positions],
        targets: vec![IGNORE; positions],
        weights: vec![1.0; positions],
        normaliser: None,
    };
    for (row, (prompt, answer)) in asked.iter().enumerate() {
        let line = format!("{prompt}{answer}\n").into_bytes();
        for (at, pair) in line.windows(2).enumerate().take(seq_len) {
            let position = row * seq_len + at;
            made.input_ids[position] = i32::from(pair[0]);
            if at + 1 >= prompt.len() {
                made.targets[position] = i32::from(pair[1]);
            }
        }
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_scores_the_answer_and_its_newline() {
        let asked = [("7+5=".to_string(), "12".to_string())];
        let batch = questions(&asked, [2, 8]);
        let ids: Vec<u8> = batch.input_ids.iter().map(|&id| id as u8).collect();
        assert_eq!(&ids, b"7+5=12\0\0\0\0\0\0\0\0\0\0");
        let mut targets = [IGNORE; 16];
        targets[3..6].copy_from_slice(&[i32::from(b'1'), i32::from(b'2'), i32::from(b'\n')]);
        assert_eq!(batch.targets, targets);
        batch.validate(2, 8, 64).unwrap();
    }

    #[test]
    fn a_score_reads_as_a_share() {
        let score = SumsScore {
            right: 973,
            total: 1000,
        };
        assert_eq!(score.to_string(), "973/1000 right (97.3 %)");
    }
}
