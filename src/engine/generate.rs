//! Text from a model: one whole forward a token, greedy or sampled by Philox.
//!
//! The bits of a position's logits depend only on the tokens up to it, so what stands behind it in
//! the window does not matter.

use super::trainer::Trainer;
use crate::backend::Backend;
use crate::data::{Batch, IGNORE};
use crate::error::{Error, RunError};
use crate::num;
use crate::num::philox::{Philox, Purpose};

/// How a token is chosen from logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it; 0 for the greatest logit.
    pub temperature: f32,
    /// Only this many of the greatest logits take part; `None` for all.
    pub top_k: Option<usize>,
    /// The seed of the random numbers.
    pub seed: u64,
}

impl Sampling {
    /// Always the greatest logit, the first of equal ones.
    pub const GREEDY: Sampling = Sampling {
        temperature: 0.0,
        top_k: None,
        seed: 0,
    };

    /// Checks that the options give a distribution.
    ///
    /// # Errors
    /// [`RunError::Sampling`] names the option.
    pub fn validate(&self) -> Result<(), RunError> {
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return Err(RunError::Sampling {
                name: "--temperature",
                expected: "a finite number of at least 0",
                found: f64::from(self.temperature),
            });
        }
        match self.top_k {
            Some(0) => Err(RunError::Sampling {
                name: "--top-k",
                expected: "at least 1",
                found: 0.0,
            }),
            _ => Ok(()),
        }
    }

    /// The token for the logits after `tokens` tokens; random number `tokens` of the seed decides.
    ///
    /// Candidates are ordered by falling logit and rising token, `p = exp((x - max) / temperature)`
    /// with the contract's exponential, and their sum runs in f64 in that order.
    ///
    /// # Errors
    /// [`RunError::NonFiniteLogits`] for a logit that is infinite or not a number.
    pub fn choose(&self, logits: &[f32], tokens: usize) -> Result<u32, RunError> {
        if let Some(index) = logits.iter().position(|x| !x.is_finite()) {
            let found = logits[index];
            return Err(RunError::NonFiniteLogits {
                tokens,
                index,
                found,
            });
        }
        let mut order: Vec<usize> = (0..logits.len()).collect();
        let falling = |&a: &usize, &b: &usize| logits[b].total_cmp(&logits[a]).then(a.cmp(&b));
        if self.temperature == 0.0 {
            return Ok(order.into_iter().min_by(falling).unwrap_or(0) as u32);
        }
        order.sort_unstable_by(falling);
        order.truncate(self.top_k.unwrap_or(usize::MAX));
        let max = order.first().map_or(0.0, |&i| logits[i]);
        let share = |&i: &usize| f64::from(num::exp((logits[i] - max) / self.temperature));
        let total: f64 = order.iter().map(share).sum();
        let numbers = Philox::new(self.seed, Purpose::Sampling, 0).block(tokens as u64);
        let unit = f64::from(numbers[0]) / f64::from(1u32 << 31) / 2.0;
        let mut left = unit * total;
        for index in &order {
            left -= share(index);
            if left < 0.0 {
                return Ok(*index as u32);
            }
        }
        Ok(order.last().map_or(0, |&i| i as u32))
    }
}

/// Why a continuation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// The model gave a token that ends a text; the token is not part of the continuation.
    Eos,
    /// As many tokens as were asked for.
    Length,
}

/// What to generate.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Tokens to generate at most.
    pub tokens: usize,
    /// Tokens that end a text.
    pub eos: Vec<u32>,
    pub sampling: Sampling,
}

/// The tokens after a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Continuation {
    pub tokens: Vec<u32>,
    pub stopped: Stopped,
}

/// Continues a prompt. Prompt and continuation fit the trainer's window, `seq_len`.
///
/// # Errors
/// An empty prompt, a token the model lacks, a text longer than the window, logits that are not
/// finite, a device fault.
pub fn generate<B: Backend>(
    trainer: &mut Trainer<B>,
    prompt: &[u32],
    request: &Request,
) -> Result<Continuation, Error> {
    let plan = trainer.session().plan().clone();
    let (seq_len, vocab_size) = (plan.inputs.seq_len, plan.vocab_size);
    request.sampling.validate()?;
    check_prompt(prompt, vocab_size)?;
    check_length(prompt.len(), request.tokens, seq_len)?;
    let mut text = prompt.to_vec();
    let mut stopped = Stopped::Length;
    while text.len() < prompt.len() + request.tokens {
        let batch = window(&text, [plan.inputs.batch, seq_len]);
        let last = text.len() - 1;
        let logits = trainer.logits_of(last..last + 1, &batch)?;
        let token = request.sampling.choose(&logits, text.len())?;
        if request.eos.contains(&token) {
            stopped = Stopped::Eos;
            break;
        }
        text.push(token);
    }
    Ok(Continuation {
        tokens: text.split_off(prompt.len()),
        stopped,
    })
}

/// Checks that a prompt has a token and only tokens of the model.
///
/// # Errors
/// [`RunError::EmptyPrompt`] or [`RunError::PromptToken`].
pub fn check_prompt(prompt: &[u32], vocab_size: usize) -> Result<(), RunError> {
    if prompt.is_empty() {
        return Err(RunError::EmptyPrompt);
    }
    match prompt.iter().position(|&t| t as usize >= vocab_size) {
        None => Ok(()),
        Some(position) => Err(RunError::PromptToken {
            position,
            found: prompt[position],
            vocab_size,
        }),
    }
}

/// Checks that a prompt and what follows it fit `maximum` positions.
///
/// # Errors
/// [`RunError::ContextTooLong`].
pub fn check_length(prompt: usize, wanted: usize, maximum: usize) -> Result<(), RunError> {
    match prompt.saturating_add(wanted) <= maximum {
        true => Ok(()),
        false => Err(RunError::ContextTooLong {
            prompt,
            wanted,
            maximum,
        }),
    }
}

/// A batch whose first sequence begins with `text`; nothing in it is scored.
fn window(text: &[u32], [batch, seq_len]: [usize; 2]) -> Batch {
    let positions = batch * seq_len;
    let mut input_ids = vec![0; positions];
    for (id, &token) in input_ids.iter_mut().zip(text) {
        *id = token as i32;
    }
    Batch {
        batch,
        seq_len,
        input_ids,
        targets: vec![IGNORE; positions],
        weights: vec![1.0; positions],
        normaliser: Some(1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [1.0, 3.0, -2.0, 3.0, 2.5];

    fn sampled(top_k: Option<usize>, seed: u64, tokens: usize) -> u32 {
        let sampling = Sampling {
            temperature: 1.0,
            top_k,
            seed,
        };
        sampling.choose(&LOGITS, tokens).unwrap()
    }

    #[test]
    fn greedy_takes_the_first_of_the_greatest() {
        assert_eq!(Sampling::GREEDY.choose(&LOGITS, 9).unwrap(), 1);
        assert_eq!(sampled(Some(1), 4, 0), 1);
    }

    #[test]
    fn samples_follow_the_distribution_the_seed_and_the_position() {
        let draw = |seed| -> Vec<u32> { (0..4000).map(|t| sampled(None, seed, t)).collect() };
        let first = draw(1);
        assert_eq!(first, draw(1));
        assert_ne!(first, draw(2));
        let total: f64 = LOGITS.iter().map(|&x| f64::from(x - 3.0).exp()).sum();
        for (token, &x) in LOGITS.iter().enumerate() {
            let found = first.iter().filter(|&&t| t as usize == token).count() as f64 / 4000.0;
            let share = f64::from(x - 3.0).exp() / total;
            // Four standard deviations of a share of one half over 4,000 draws are 0.032.
            assert!(
                (found - share).abs() < 0.032,
                "{token}: {found} for {share}"
            );
        }
        assert!((0..500).all(|t| [1, 3].contains(&sampled(Some(2), 1, t))));
    }

    #[test]
    fn options_and_logits_without_a_distribution_are_refused() {
        for (temperature, top_k, name) in [
            (f32::NAN, None, "--temperature"),
            (-1.0, None, "--temperature"),
            (1.0, Some(0), "--top-k"),
        ] {
            let sampling = Sampling {
                temperature,
                top_k,
                seed: 0,
            };
            let refused = sampling.validate().unwrap_err();
            assert!(refused.to_string().starts_with(name), "{refused}");
        }
        let refused = Sampling::GREEDY.choose(&[0.0, f32::NAN], 3).unwrap_err();
        assert!(matches!(
            refused,
            RunError::NonFiniteLogits {
                index: 1,
                tokens: 3,
                ..
            }
        ));
        assert_eq!(refused.exit_code().code(), 5);
    }

    #[test]
    fn prompts_that_do_not_fit_are_refused() {
        assert!(matches!(check_prompt(&[], 4), Err(RunError::EmptyPrompt)));
        assert!(matches!(
            check_prompt(&[3, 4], 4),
            Err(RunError::PromptToken {
                position: 1,
                found: 4,
                vocab_size: 4
            })
        ));
        check_length(3, 5, 8).unwrap();
        let refused = check_length(3, 6, 8).unwrap_err().to_string();
        assert!(refused.ends_with("lower --tokens to 5"), "{refused}");
    }
}
