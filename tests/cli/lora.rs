//! Adapters from recipe to merged folder: a small base that has learned sums learns differences beside its
//! frozen weights.

use std::fmt::Write as _;

use super::train::{assert_refused, path, value};
use super::{Ran, bitstep};

/// The keys that a small base differs in from the shipped recipe.
const SMALL: [&str; 6] = [
    "model.d_model=64",
    "model.n_layers=1",
    "model.d_ff=128",
    "data.batch=16",
    "steps=300",
    "schedule.warmup=20",
];

/// What trains beside the base or evaluates it; `{lora}` is the section of adapters.
const RECIPE: &str = r#"
name = "differences"
seed = 2
steps = 200
[model]
path = "base/model"
{lora}
[data]
source = "text"
path = "differences.txt"
batch = 16
seq_len = 32
validation = 0.1
[optimizer]
lr = 1e-2
beta2 = 0.99
[schedule]
kind = "cosine"
warmup = 5
"#;

const ADAPTERS: &str = "[lora]\nrank = 8\nalpha = 16\nbase = \"nf4\"";

fn differences() -> String {
    let mut text = String::new();
    for i in 0..4000_u32 {
        let (a, b) = (i * 37 % 90 + 10, i * 53 % 97);
        let (a, b) = (a.max(b), a.min(b));
        writeln!(text, "{a}-{b}={}", a - b).expect("text");
    }
    text
}

fn done(ran: Ran) -> Ran {
    assert_eq!(ran.code, 0, "{}{}", ran.out, ran.err);
    ran
}

/// A folder with a trained base, the text of the new task, and the recipes of adapters and of none.
fn workplace() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let write =
        |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("writes");
    write("differences.txt", &differences());
    write("lora.toml", &RECIPE.replace("{lora}", ADAPTERS));
    write("plain.toml", &RECIPE.replace("{lora}", ""));
    let sums = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/sums.toml");
    let base = path(&folder, "base");
    let mut arguments = vec!["train", sums, "--device", "cpu", "--out", &base];
    arguments.extend(SMALL.iter().flat_map(|key| ["--set", key]));
    done(bitstep(&arguments));
    folder
}

/// The validation loss that a run of the program has printed.
fn loss(ran: &Ran) -> f64 {
    let mut words = value(&ran.out, "validation").split_whitespace();
    let loss = words.nth(1).expect("a loss").trim_end_matches(',');
    loss.parse().expect("a number")
}

#[test]
fn adapters_learn_what_their_base_cannot_and_merge_into_a_folder_that_can() {
    let folder = workplace();
    let at = |name: &str| path(&folder, name);
    let (lora, plain, run) = (at("lora.toml"), at("plain.toml"), at("run"));
    let before = loss(&done(bitstep(&["eval", &plain, "--device", "cpu"])));
    let base = std::fs::read(folder.path().join("base/model/model.safetensors")).expect("a base");
    let trained = done(bitstep(&["train", &lora, "--device", "cpu", "--out", &run]));
    let after = loss(&trained);
    assert!(after < 0.5 * before, "from {before} to {after}");
    let still = std::fs::read(folder.path().join("base/model/model.safetensors")).expect("a base");
    assert!(base == still, "the base keeps its bits");

    let merged = at("merged");
    done(bitstep(&["export", "--merge", &run, &merged]));
    let whole = done(bitstep(&[
        "eval", &plain, "--model", &merged, "--device", "cpu",
    ]));
    assert!(
        (loss(&whole) - after).abs() < 1e-5,
        "{} {after}",
        loss(&whole)
    );
    // Beside the numbers that were quantised, not those that their codes stand for, they are another function.
    let (adapter, other) = (at("run/adapter"), at("other"));
    let model = at("base/model");
    done(bitstep(&[
        "export", "--merge", &adapter, &other, "--model", &model,
    ]));
    let other = done(bitstep(&[
        "eval", &plain, "--model", &other, "--device", "cpu",
    ]));
    assert!(
        (loss(&other) - after).abs() > 1e-4,
        "{} {after}",
        loss(&other)
    );

    let again = format!("lora.adapter={adapter}");
    let resumed = done(bitstep(&[
        "eval", &lora, "--set", &again, "--device", "cpu",
    ]));
    assert!(
        (loss(&resumed) - after).abs() < 1e-6,
        "{} {after}",
        loss(&resumed)
    );

    let into = bitstep(&["export", "--merge", &run, &merged]);
    assert_refused(&into, 2, "is not empty");
    let file = folder.path().join("run/adapter/adapter_config.json");
    let json = std::fs::read_to_string(&file).expect("a configuration");
    std::fs::write(&file, json.replace("base_model_name_or_path", "other")).expect("writes");
    let nowhere = bitstep(&["export", "--merge", &adapter, &at("nowhere")]);
    assert_refused(&nowhere, 4, "names no base model");
}

#[test]
fn adapters_beside_a_packed_base_go_on_from_a_checkpoint_with_the_same_bits() {
    let folder = tempfile::tempdir().expect("a folder");
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/qlora-tiny-bf16.toml");
    let (whole, halves) = (path(&folder, "whole"), path(&folder, "halves"));
    let keys = ["--set", "steps=8", "--set", "checkpoint.every=4"];
    let train = |more: &[&str]| {
        let mut arguments = vec!["train", recipe, "--device", "cpu"];
        arguments.extend(keys.iter().chain(more));
        done(bitstep(&arguments))
    };
    let expected = train(&["--out", &whole]);
    train(&["--out", &halves, "--until", "4"]);
    let resumed = done(bitstep(&["train", "--resume", &halves, "--device", "cpu"]));
    let root = |ran: &Ran| value(&ran.out, "root").to_owned();
    assert_eq!(root(&resumed), root(&expected));
    let adapter = |run: &str| {
        let file = std::path::Path::new(run).join("adapter/adapter_model.safetensors");
        std::fs::read(file).expect("adapters")
    };
    assert!(adapter(&whole) == adapter(&halves));
}

#[test]
fn a_frozen_base_is_recomputed_unless_something_else_is_asked_for() {
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/qlora-tiny.toml");
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/qlora-tiny.golden");
    let steps = ["--set", "steps=4", "--device", "cpu"];
    let train = |more: &[&str]| done(bitstep(&[&["train", recipe], &steps[..], more].concat()));
    let (anew, kept) = (train(&[]), train(&["--recompute", "0"]));
    assert_eq!(value(&anew.out, "root "), value(&kept.out, "root "));
    // Told before the first step, and what it saves.
    let arena = |ran: &Ran| -> usize {
        let words = value(&ran.err, "  arena ");
        let bytes = words.split_whitespace().next().expect("a number");
        bytes.parse().expect("bytes")
    };
    assert_eq!(value(&anew.err, "  form "), "recomputation of each layer");
    assert!(!kept.err.contains("  form "), "{}", kept.err);
    assert!(arena(&anew) < arena(&kept));

    // Maxima that are quantised themselves are another base.
    let double = ["--set", "lora.base=nf4-double"];
    assert_ne!(
        value(&train(&double).out, "root "),
        value(&anew.out, "root ")
    );

    let shown = |more: &[&str]| done(bitstep(&[&["inspect", recipe], more].concat())).out;
    assert_eq!(value(&shown(&[]), "form "), "recomputation of each layer");
    assert!(shown(&double).contains(" frozen nf4, doubly quantised"));
    let zero = shown(&["--set", "memory.recompute=0"]);
    assert!(!zero.contains("\nform "), "{zero}");
    let refused = bitstep(&["inspect", recipe, "--set", "memory.recompute=-1"]);
    assert_refused(&refused, 2, "memory.recompute");
    // Every op is compared where no form is asked for.
    let verify = |more: &[&str]| done(bitstep(&[&["verify", golden], more].concat())).out;
    assert!(!verify(&[]).contains(" 0 op outputs"));
    assert!(verify(&["--recompute", "1"]).contains(" 0 op outputs"));
}

#[test]
fn a_budget_of_the_arena_keeps_the_bits_and_says_what_it_computes_again() {
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/qlora-tiny.toml");
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/qlora-tiny.golden");
    let arena = |more: &[&str]| -> usize {
        let shown = done(bitstep(&[&["inspect", recipe], more].concat())).out;
        let words = value(&shown, "  arena ");
        let bytes = words.split_whitespace().next().expect("a number");
        bytes.parse().expect("bytes")
    };
    let (kept, anew) = (arena(&["--set", "memory.recompute=0"]), arena(&[]));
    assert!(anew < kept);
    let budget = ((kept + anew) / 2).to_string();
    let set = format!("memory.arena_bytes={budget}");
    let shown = done(bitstep(&["inspect", recipe, "--set", &set])).out;
    let form = format!("an arena of at most {budget} bytes");
    assert_eq!(value(&shown, "form "), form);
    assert!(arena(&["--set", &set]) <= (kept + anew) / 2);
    let again: Vec<&str> = shown.lines().filter(|l| l.starts_with("again ")).collect();
    assert!(!again.is_empty(), "{shown}");
    let says = |line: &&str| line.contains(" layers") && line.ends_with(" bytes not kept");
    assert!(again.iter().any(says), "{shown}");

    let bytes = ["--arena-bytes", budget.as_str()];
    let steps = ["train", recipe, "--set", "steps=4", "--device", "cpu"];
    let train = |more: &[&str]| done(bitstep(&[&steps[..], more].concat()));
    let (budgeted, layers) = (train(&bytes), train(&[]));
    assert_eq!(value(&budgeted.out, "root "), value(&layers.out, "root "));
    assert_eq!(value(&budgeted.err, "  form "), form);
    assert!(budgeted.err.contains("\n  again "), "{}", budgeted.err);
    let verified = done(bitstep(&[&["verify", golden], &bytes[..]].concat())).out;
    assert!(verified.contains(" 0 op outputs"), "{verified}");

    let both = ["--set", "memory.recompute=1"];
    let refused = bitstep(&[&["inspect", recipe, "--set", &set], &both[..]].concat());
    assert_refused(&refused, 2, "memory.arena_bytes");
    let refused = bitstep(&[&steps[..], &bytes, &["--recompute", "1"]].concat());
    assert_eq!(refused.code, 2);
    assert!(
        refused.err.contains("cannot be used with"),
        "{}",
        refused.err
    );
    let refused = bitstep(&["inspect", recipe, "--set", "memory.arena_bytes=1000"]);
    assert_refused(&refused, 2, "with everything computed again, found 1000");
}
