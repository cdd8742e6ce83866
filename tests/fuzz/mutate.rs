//! Changes to inputs, and a corpus that grows by those that make a reader say something new.

use std::collections::BTreeSet;

use bitstep::num::philox::{Philox, Purpose};

/// Random numbers of one run, in order.
pub struct Random {
    philox: Philox,
    next: u64,
}

impl Random {
    pub fn new(seed: u64) -> Self {
        Random {
            philox: Philox::new(seed, Purpose::DataOrder, 0),
            next: 0,
        }
    }

    /// A number below `limit`, which is at least 1.
    pub fn below(&mut self, limit: usize) -> usize {
        self.next += 1;
        self.philox.below(self.next, limit as u64) as usize
    }

    fn of<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len())]
    }
}

/// Numbers at which readers err, as text.
const NUMBERS: [&str; 16] = [
    "0",
    "-1",
    "1",
    "255",
    "65536",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "1e999",
    "-0.0",
    "nan",
    "inf",
];

/// The most that one input grows to.
const LONGEST: usize = 1 << 16;

/// Changes `input` a few times; `other` is another input to take parts of, `words` what the format knows.
pub fn mutate(input: &mut Vec<u8>, other: &[u8], words: &[&str], random: &mut Random) {
    for _ in 0..=random.below(4) {
        once(input, other, words, random);
    }
    input.truncate(LONGEST);
}

fn once(input: &mut Vec<u8>, other: &[u8], words: &[&str], random: &mut Random) {
    let at = random.below(input.len() + 1);
    let most = 1 << random.below(8);
    let length = random.below(most);
    let end = input.len().min(at + length);
    match random.below(10) {
        0 if at < input.len() => input[at] ^= 1 << random.below(8),
        1 if at < input.len() => input[at] = *random.of(&[0, 1, 9, 32, 34, 127, 128, 255]),
        2 => drop(input.drain(at..end)),
        3 => {
            let part = input[at..end].to_vec();
            input.splice(at..at, part);
        }
        4 => {
            let bytes: Vec<u8> = (0..length.min(16))
                .map(|_| random.below(256) as u8)
                .collect();
            input.splice(at..at, bytes);
        }
        5 => input.truncate(at),
        6 if !other.is_empty() => {
            let from = random.below(other.len());
            let to = other.len().min(from + length);
            input.splice(at..end, other[from..to].iter().copied());
        }
        7 => number(input, at, random),
        8 if !words.is_empty() => {
            let word = random.of(words).bytes();
            input.splice(at..at, word);
        }
        9 => line(input, at, random),
        _ => {}
    }
}

/// Another number in the place of the next one, as text; else eight bytes that are a number.
fn number(input: &mut Vec<u8>, at: usize, random: &mut Random) {
    let digit = |b: &u8| b.is_ascii_digit();
    match input[at..].iter().position(digit) {
        Some(start) if random.below(4) > 0 => {
            let start = at + start;
            let rest = input[start..].iter();
            let end = start + rest.take_while(|b| digit(b)).count();
            input.splice(start..end, random.of(&NUMBERS).bytes());
        }
        _ => {
            let values = [0, 1, 7, 255, 1 << 31, (1 << 32) - 1, 1 << 63, u64::MAX];
            let bytes = random.of(&values).to_le_bytes();
            let width = *random.of(&[2, 4, 8]);
            for (place, byte) in input[at..].iter_mut().zip(&bytes[..width]) {
                *place = *byte;
            }
        }
    }
}

/// Takes out or doubles the line at `at`.
fn line(input: &mut Vec<u8>, at: usize, random: &mut Random) {
    let newline = |b: &u8| *b == b'\n';
    let start = input[..at].iter().rposition(newline).map_or(0, |i| i + 1);
    let end = input[at..]
        .iter()
        .position(newline)
        .map_or(input.len(), |i| at + i + 1);
    match random.below(2) {
        0 => drop(input.drain(start..end)),
        _ => {
            let part = input[start..end].to_vec();
            input.splice(start..start, part);
        }
    }
}

/// Inputs from which others are made.
pub struct Corpus {
    inputs: Vec<Vec<u8>>,
    /// How many of them were there from the beginning.
    whole: usize,
    /// What readers have said so far, without numbers and names.
    said: BTreeSet<String>,
}

/// Inputs that a corpus grows to at most.
const MOST_INPUTS: usize = 4000;

impl Corpus {
    pub fn new(seeds: Vec<Vec<u8>>) -> Self {
        Corpus {
            whole: seeds.len(),
            inputs: seeds,
            said: BTreeSet::new(),
        }
    }

    /// The next input. Every other one comes from an input that is whole: those that were kept are refused
    /// sooner.
    pub fn next(&self, words: &[&str], random: &mut Random) -> Vec<u8> {
        let from = match random.below(2) {
            0 => &self.inputs[..self.whole],
            _ => &self.inputs[..],
        };
        let mut input = random.of(from).clone();
        let other = random.of(&self.inputs);
        mutate(&mut input, other, words, random);
        input
    }

    /// Keeps an input to which a reader has said something new.
    pub fn heard(&mut self, input: &[u8], said: &str) {
        let plain = plain(said);
        if self.inputs.len() < MOST_INPUTS && self.said.insert(plain) {
            self.inputs.push(input.to_vec());
        }
    }

    /// How many different things readers have said.
    pub fn answers(&self) -> usize {
        self.said.len()
    }
}

/// The first words of a text that are words of the program: no numbers, no names, nothing that was quoted.
fn plain(said: &str) -> String {
    let outside = said.split(['"', '`', '\'']).step_by(2);
    let words = outside.flat_map(str::split_whitespace);
    let own = |word: &&str| {
        word.chars()
            .all(|c| c.is_ascii_lowercase() || ",:;()".contains(c))
    };
    words.filter(own).take(16).collect::<Vec<_>>().join(" ")
}
