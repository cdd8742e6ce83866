//! Evaluation between steps, the best checkpoint, TensorBoard files, and the page of `report`.

use std::path::Path;

use serde_json::Value;

use super::resume::steps;
use super::train::{assert_refused, metrics, path, value, workplace};
use super::{Ran, bitstep};

/// A run with what is recorded only when it is asked for.
const RECORDED: [&str; 12] = [
    "--set",
    "evaluation.every=4",
    "--set",
    "evaluation.batches=3",
    "--set",
    "metrics.group_norms_every=1",
    "--set",
    "metrics.tensorboard=true",
    "--set",
    "digest.every=1",
    "--quiet",
    "--device=cpu",
];

fn train(recipe: &str, out: &str, more: &[&str]) -> Ran {
    let ran = bitstep(&[&["train", recipe, "--out", out][..], more].concat());
    assert_eq!(ran.code, 0, "{}", ran.err);
    ran
}

#[test]
fn an_evaluation_between_steps_changes_no_bit_of_training() {
    let (folder, recipe) = workplace();
    let mamba = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/mamba-tiny.toml");
    let mamba = mamba.display().to_string();
    let text = path(&folder, "t.txt");
    std::fs::write(&text, "a state goes on from window to window. ".repeat(99)).expect("writes");
    let of_text = format!("--set=data.path={text:?}");
    // A state that training carries on must not be touched by the windows that are evaluated.
    let carried = [
        "--steps=12",
        "--set=data.source=text",
        &of_text,
        "--set=data.windows=consecutive",
        "--set=data.validation=0.25",
        "--set=model.vocab_size=128",
    ];
    let recipes: [(&str, &[&str]); 5] = [
        (&recipe, &[]),
        (&recipe, &["--set", "precision.domain=bf16.sm90"]),
        (&recipe, &["--set", "precision.domain=f16.sm90"]),
        (&mamba, &["--steps", "8"]),
        (&mamba, &carried),
    ];
    for (index, (recipe, sets)) in recipes.into_iter().enumerate() {
        let plain = path(&folder, &format!("plain-{index}"));
        let evaluated = path(&folder, &format!("evaluated-{index}"));
        let quiet = [sets, &["--quiet", "--device=cpu"]].concat();
        let without = train(recipe, &plain, &quiet);
        let every = [&RECORDED[..], sets, &["--set", "evaluation.every=1"]].concat();
        let with = train(recipe, &evaluated, &every);
        for key in ["root ", "manifest ", "final loss "] {
            assert_eq!(value(&with.out, key), value(&without.out, key), "{sets:?}");
        }
        let bits = |run: &str| -> Vec<Value> {
            metrics(run)
                .iter()
                .map(|l| l["loss_bits"].clone())
                .collect()
        };
        assert_eq!(bits(&evaluated), bits(&plain));
        // Eager in warm-up and replayed after it: each step has its numbers, and they move.
        let losses: Vec<f64> = metrics(&evaluated)
            .iter()
            .map(|line| line["validation"]["loss"].as_f64().expect("a loss"))
            .collect();
        assert!(
            losses.windows(2).all(|pair| pair[0] != pair[1]),
            "{losses:?}"
        );
    }
}

#[test]
fn each_number_is_recorded_at_its_steps_and_agrees_with_the_others() {
    let (folder, recipe) = workplace();
    let run = path(&folder, "run");
    train(&recipe, &run, &RECORDED);
    let lines = metrics(&run);
    for (step, line) in lines.iter().enumerate() {
        let evaluated = (step + 1) % 4 == 0 || step == 9;
        assert_eq!(line.get("validation").is_some(), evaluated, "step {step}");
        let norms = line["group_norms"].as_object().expect("norms");
        let names: Vec<&str> = norms.keys().map(String::as_str).collect();
        assert_eq!(names, ["embedding", "final norm", "head", "layer 0"]);
        let squares = norms
            .values()
            .map(|n| n.as_f64().expect("a number").powi(2));
        let norm = squares.sum::<f64>().sqrt();
        let global = line["grad_norm"].as_f64().expect("a norm");
        assert!(
            (norm / global - 1.0).abs() < 1e-6,
            "step {step}: {norm}, {global}"
        );
    }
    let found = &lines[9]["validation"];
    let number = |key: &str| found[key].as_f64().expect("a number");
    assert!((number("loss").exp() / number("perplexity") - 1.0).abs() < 1e-12);
    assert!((0.0..=1.0).contains(&number("accuracy")) && number("scored") > 0.0);
    // The whole of what is set aside is evaluated where no number of batches is given.
    let all = path(&folder, "all");
    let ran = train(
        &recipe,
        &all,
        &["--quiet", "--device=cpu", "--set", "evaluation.every=10"],
    );
    let loss = metrics(&all)[9]["validation"]["loss"]
        .as_f64()
        .expect("a loss");
    let line = value(&ran.out, "validation ");
    assert!(
        line.starts_with(&format!("loss {loss:.6},")),
        "{line}: {loss}"
    );
}

#[test]
fn an_evaluation_is_shown_also_where_nothing_is_kept() {
    let (_folder, recipe) = workplace();
    let sets = ["--set=evaluation.every=5", "--device=cpu"];
    let ran = bitstep(&[&["train", recipe.as_str()][..], &sets].concat());
    assert_eq!(ran.code, 0, "{}", ran.err);
    for taken in [5, 10] {
        let line = value(&ran.err, &format!("after {taken} steps: validation loss "));
        assert!(line.ends_with("% right"), "{}", ran.err);
    }
    let quiet = [&["train", recipe.as_str(), "--quiet"][..], &sets].concat();
    assert_eq!(bitstep(&quiet).err, "");
}

#[test]
fn evaluation_keys_that_have_no_meaning_are_refused() {
    let (folder, recipe) = workplace();
    std::fs::write(folder.path().join("t.txt"), "text ".repeat(99)).expect("writes");
    let refused = |sets: &[&str], part: &str| {
        let args = [&["train", recipe.as_str()][..], sets].concat();
        assert_refused(&bitstep(&args), 2, part);
    };
    let text = [
        "--set=data.source=text",
        "--set=data.path=t.txt",
        "--set=evaluation.every=2",
    ];
    refused(
        &text,
        "`evaluation.every` has no meaning beside data.validation = 0",
    );
    refused(
        &["--set=evaluation.batches=2"],
        "beside no evaluation.every",
    );
    refused(
        &["--set=checkpoint.keep_best=true"],
        "beside no evaluation.every",
    );
}

#[test]
fn the_best_checkpoint_is_kept_also_by_a_run_that_goes_on() {
    let (folder, recipe) = workplace();
    // At this rate the loss on the data set aside falls and then rises again.
    let sets = [
        "--set=optimizer.lr=0.3",
        "--set=evaluation.every=1",
        "--set=evaluation.batches=2",
        "--set=checkpoint.keep_best=true",
        "--set=checkpoint.keep_last=1",
        "--set=checkpoint.every=5",
        "--quiet",
        "--device=cpu",
    ];
    let whole = path(&folder, "whole");
    let ran = train(&recipe, &whole, &sets);
    let losses: Vec<f64> = metrics(&whole)
        .iter()
        .map(|line| line["validation"]["loss"].as_f64().expect("a loss"))
        .collect();
    let lowest = losses.iter().copied().fold(f64::INFINITY, f64::min);
    let best = 1 + losses.iter().position(|l| *l == lowest).expect("one") as u64;
    assert!(best < 10, "the loss rises again: {losses:?}");
    assert_eq!(steps(&whole), [best, 10]);
    assert!(value(&ran.out, "best ").starts_with(&format!("step-{best},")));
    let parts = path(&folder, "parts");
    train(&recipe, &parts, &[&sets[..], &["--until", "9"]].concat());
    let args = ["train", "--resume", &parts, "--quiet", "--device=cpu"];
    let second = bitstep(&args);
    assert_eq!(second.code, 0, "{}", second.err);
    assert_eq!(steps(&parts), [best, 10]);
    assert_eq!(value(&second.out, "best "), value(&ran.out, "best "));
}

/// The records of an event file, their checksums apart.
fn records(bytes: &[u8]) -> Vec<&[u8]> {
    let (mut at, mut found) = (0, Vec::new());
    while at < bytes.len() {
        let length = u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight")) as usize;
        found.push(&bytes[at + 12..at + 12 + length]);
        at += 16 + length;
    }
    found
}

#[test]
fn event_files_have_a_record_a_step_and_a_new_one_for_each_process() {
    let (folder, recipe) = workplace();
    let run = path(&folder, "run");
    train(&recipe, &run, &[&RECORDED[..], &["--until", "6"]].concat());
    let resumed = bitstep(&["train", "--resume", &run, "--quiet", "--device=cpu"]);
    assert_eq!(resumed.code, 0, "{}", resumed.err);
    let listed = std::fs::read_dir(Path::new(&run).join("tensorboard")).expect("lists");
    let mut files: Vec<_> = listed
        .map(|entry| entry.expect("an entry").path())
        .collect();
    files.sort();
    assert_eq!(files.len(), 2);
    let counts = files.iter().map(|file| {
        let bytes = std::fs::read(file).expect("reads");
        let tag = b"train/loss".as_slice();
        let with_loss = |record: &&[u8]| record.windows(tag.len()).any(|part| part == tag);
        records(&bytes)
            .iter()
            .filter(|record| with_loss(record))
            .count()
    });
    let mut counts: Vec<usize> = counts.collect();
    counts.sort_unstable();
    assert_eq!(counts, [4, 6]);
}

#[test]
fn a_report_shows_a_run_and_where_two_runs_part() {
    let (folder, recipe) = workplace();
    let [one, same, other] = ["one", "same", "other"].map(|name| path(&folder, name));
    train(&recipe, &one, &RECORDED);
    train(&recipe, &same, &RECORDED);
    let rate = ["--set", "schedule.kind=linear"];
    train(&recipe, &other, &[&RECORDED[..], &rate].concat());
    let charts = path(&folder, "charts");
    let lone = bitstep(&["report", &one, "--svg", &charts]);
    assert_eq!(lone.code, 0, "{}", lone.err);
    assert!(value(&lone.out, "page ").ends_with("report.html"));
    assert!(value(&lone.out, "charts ").starts_with("6 in"));
    let page = std::fs::read_to_string(Path::new(&one).join("report.html")).expect("a page");
    let root = metrics(&one)[9]["root"]
        .as_str()
        .expect("a root")
        .to_owned();
    assert!(page.contains(&root) && page.contains("<dt>MFU</dt>"));
    let svg = std::fs::read_to_string(Path::new(&charts).join("loss.svg")).expect("a chart");
    assert!(svg.starts_with("<svg xmlns=") && svg.contains("validation</text>"));
    let out = path(&folder, "page.html");
    let compared = |other: &str| {
        let ran = bitstep(&["report", &one, other, "--out", &out]);
        assert_eq!(ran.code, 0, "{}", ran.err);
        value(&ran.out, "runs ").to_owned()
    };
    assert_eq!(
        compared(&same),
        "identical: the loss bits of 10 steps and 10 roots"
    );
    // The rates of the first step are one number, those of the second are not.
    assert_eq!(
        compared(&other),
        "the roots part after 2 steps, the losses at step 2"
    );
    assert!(
        std::fs::read_to_string(&out)
            .expect("a page")
            .contains("verdict parted")
    );
    assert_refused(
        &bitstep(&["report", &charts]),
        4,
        "has no metrics.jsonl with a step",
    );
    std::fs::write(Path::new(&same).join("metrics.jsonl"), "{}\n").expect("writes");
    assert_refused(
        &bitstep(&["report", &same]),
        4,
        "metrics.jsonl:1: missing field `step`",
    );
}
