//! Every reader of a file, fed with damaged files: an error or a whole answer, never a panic, never a wrong answer.
//!
//! `FUZZ_EXECUTIONS=1000000 cargo test --release --test suite fuzz:: -- --nocapture` runs so many inputs against
//! each reader; without it a few hundred. `FUZZ_SEED` gives other inputs. An input at which a reader fails is left in
//! `target/fuzz/`. Inputs that make a reader say something new are kept and changed further.

mod mutate;
mod targets;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use mutate::{Corpus, Random};

/// Reads an input; says what came of it.
type Read = Box<dyn Fn(&[u8]) -> String>;

/// A reader and what is known of its inputs.
pub struct Target {
    pub name: &'static str,
    /// Whole inputs.
    pub seeds: Vec<Vec<u8>>,
    /// Words of the format.
    pub words: &'static [&'static str],
    /// Panics where something must not be so.
    pub read: Read,
}

fn number(variable: &str, default: u64) -> u64 {
    let text = std::env::var(variable).ok();
    text.map_or(default, |text| text.parse().expect("a number"))
}

/// Feeds a reader; the inputs it failed at, at most ten.
fn failures(target: &Target, executions: u64, seed: u64) -> Vec<Vec<u8>> {
    let mut random = Random::new(seed);
    let mut corpus = Corpus::new(target.seeds.clone());
    let (mut failed, mut accepted) = (Vec::new(), 0u64);
    for _ in 0..executions {
        let input = corpus.next(target.words, &mut random);
        match catch_unwind(AssertUnwindSafe(|| (target.read)(&input))) {
            Ok(said) => {
                accepted += u64::from(said == ACCEPTED);
                corpus.heard(&input, &said);
            }
            Err(_) => failed.push(input),
        }
        if failed.len() == 10 {
            break;
        }
    }
    println!(
        "fuzz {}: {executions} executions, {accepted} accepted, {} different answers, {} failures",
        target.name,
        corpus.answers(),
        failed.len()
    );
    failed
}

/// What a target says of an input that was read whole.
const ACCEPTED: &str = "accepted";

fn fuzz(target: Target) {
    for seed in &target.seeds {
        assert_eq!((target.read)(seed), ACCEPTED, "a seed of {}", target.name);
    }
    let failed = failures(
        &target,
        number("FUZZ_EXECUTIONS", 400),
        number("FUZZ_SEED", 1),
    );
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/fuzz");
    for (index, input) in failed.iter().enumerate() {
        std::fs::create_dir_all(&folder).expect("a folder");
        let file = folder.join(format!("{}-{index}", target.name));
        std::fs::write(&file, input).expect("writes");
        eprintln!("failed at {}", file.display());
    }
    assert!(
        failed.is_empty(),
        "{} failures of {}",
        failed.len(),
        target.name
    );
}

#[test]
fn safetensors_are_read_whole_or_refused() {
    fuzz(targets::safetensors());
}

#[test]
fn recipes_are_read_whole_or_refused() {
    fuzz(targets::recipe());
}

#[test]
fn goldens_are_read_whole_or_refused() {
    fuzz(targets::golden());
}

#[test]
fn states_of_checkpoints_are_read_whole_or_refused() {
    fuzz(targets::checkpoint_state());
}

#[test]
fn tensors_of_checkpoints_are_read_whole_or_refused() {
    fuzz(targets::checkpoint_tensors());
}

#[test]
fn token_files_are_read_whole_or_refused() {
    fuzz(targets::tokens());
}

#[test]
fn tokenizers_are_read_whole_or_refused() {
    fuzz(targets::tokenizer());
}

#[test]
fn model_configurations_are_read_whole_or_refused() {
    fuzz(targets::model_configuration());
}

#[test]
fn adapter_configurations_are_read_whole_or_refused() {
    fuzz(targets::adapter_configuration());
}

#[test]
fn metrics_are_read_whole_or_refused() {
    fuzz(targets::metrics());
}

#[test]
fn a_reader_that_panics_on_some_input_is_found() {
    let read = |input: &[u8]| match input {
        [b'a', b'b', _, ..] if input.contains(&b'!') => panic!("planned"),
        [first, ..] => format!("begins with {}", char::from(*first)),
        [] => ACCEPTED.to_owned(),
    };
    let target = Target {
        name: "planned",
        seeds: vec![Vec::new()],
        words: &["ab", "!"],
        read: Box::new(read),
    };
    assert!(!failures(&target, 20_000, 3).is_empty());
}
