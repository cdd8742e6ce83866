//! Runs that stop and go on: `train --until`, `--resume`, signals.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::bitstep;
use super::train::{TINY, assert_refused, metrics, path, value, workplace};

/// The steps of the checkpoints in a run's folder.
pub fn steps(run: &str) -> Vec<u64> {
    let root = Path::new(run).join("checkpoints");
    let whole = ::bitstep::io::checkpoint::list(&root).expect("lists").whole;
    whole.into_iter().map(|(step, _)| step).collect()
}

/// The metrics that depend on bits alone.
fn bits(run: &str) -> Vec<(u64, String)> {
    let line = |line: &serde_json::Value| {
        let step = line["step"].as_u64().expect("a step");
        (step, line["loss_bits"].to_string())
    };
    metrics(run).iter().map(line).collect()
}

#[test]
fn a_run_in_two_parts_is_the_run_in_one() {
    let (folder, recipe) = workplace();
    let (whole, parts) = (path(&folder, "whole"), path(&folder, "parts"));
    let one = bitstep(&["train", &recipe, "--out", &whole, "--quiet"]);
    assert_eq!(one.code, 0, "{}", one.err);
    assert!(steps(&whole).is_empty(), "none was asked for");
    let first = bitstep(&["train", &recipe, "--out", &parts, "--quiet", "--until", "4"]);
    assert_eq!(first.code, 0, "{}", first.err);
    assert!(value(&first.out, "saved ").contains("step-4 after 4 of 10 steps"));
    assert!(!Path::new(&parts).join("model").exists());
    // What an interrupted save leaves is named and removed.
    let unfinished = Path::new(&parts).join("checkpoints/.writing-step-5");
    std::fs::create_dir(&unfinished).expect("a folder");
    let second = bitstep(&["train", "--resume", &parts, "--quiet"]);
    assert_eq!(second.code, 0, "{}", second.err);
    assert!(second.err.contains(".writing-step-5") && !unfinished.exists());
    assert_eq!(bits(&parts), bits(&whole));
    for key in ["root ", "manifest ", "final loss "] {
        assert_eq!(value(&second.out, key), value(&one.out, key));
    }
    let weights = |run: &str| std::fs::read(Path::new(run).join("model/model.safetensors"));
    assert_eq!(
        weights(&parts).expect("a model"),
        weights(&whole).expect("a model")
    );
}

#[test]
fn a_damaged_newest_checkpoint_is_named_and_passed_over_only_when_asked() {
    let (folder, recipe) = workplace();
    let run = path(&folder, "run");
    let every = ["--set", "checkpoint.every=3", "--quiet"];
    let ran = bitstep(&[&["train", recipe.as_str(), "--out", &run][..], &every].concat());
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert_eq!(steps(&run), [3, 6, 9, 10]);
    let tensors = Path::new(&run).join("checkpoints/step-10/tensors.safetensors");
    let mut bytes = std::fs::read(&tensors).expect("reads");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&tensors, bytes).expect("writes");
    let refused = bitstep(&["train", "--resume", &run, "--quiet"]);
    assert_refused(&refused, 4, "step-10");
    assert!(refused.err.contains("tensor `moment2."), "{}", refused.err);
    assert_eq!(steps(&run), [3, 6, 9, 10], "a refusal changes nothing");
    let gone_on = bitstep(&["train", "--resume", &run, "--resume-previous", "--quiet"]);
    assert_eq!(gone_on.code, 0, "{}", gone_on.err);
    assert!(gone_on.err.contains("damaged-step-10"), "{}", gone_on.err);
    assert_eq!(value(&gone_on.out, "root "), value(&ran.out, "root "));
    assert_eq!(steps(&run), [3, 6, 9, 10]);
}

#[test]
fn a_run_goes_on_only_with_its_own_recipe_and_from_a_checkpoint() {
    let (folder, recipe) = workplace();
    let run = path(&folder, "run");
    let args = ["train", &recipe, "--out", &run, "--quiet", "--until", "2"];
    assert_eq!(bitstep(&args).code, 0);
    let kept = Path::new(&run).join("recipe.toml");
    let text = std::fs::read_to_string(&kept).expect("reads");
    std::fs::write(&kept, text.replace("beta2 = 0.95", "beta2 = 0.99")).expect("writes");
    let other = bitstep(&["train", "--resume", &run, "--quiet"]);
    assert_refused(&other, 4, "expected `beta2 = 0.99`, found `beta2 = 0.95`");
    std::fs::write(&kept, text).expect("writes");
    std::fs::remove_dir_all(Path::new(&run).join("checkpoints")).expect("removes");
    let none = bitstep(&["train", "--resume", &run, "--quiet"]);
    assert_refused(&none, 4, "no complete checkpoint");
    assert_eq!(
        bitstep(&["train", "--resume", &run, "--steps", "3"]).code,
        2
    );
}

#[test]
fn a_run_that_stops_on_a_value_that_is_not_finite_names_its_last_checkpoint() {
    let (folder, recipe) = workplace();
    let run = path(&folder, "run");
    let sets = ["--set=optimizer.lr=1e30", "--set=checkpoint.every=1"];
    let args = [
        &["train", recipe.as_str(), "--out", &run, "--quiet"][..],
        &sets,
    ]
    .concat();
    for (index, arguments) in [&args[..], &["train", "--resume", &run, "--quiet"]]
        .into_iter()
        .enumerate()
    {
        let ran = bitstep(arguments);
        assert_refused(&ran, 5, "training stopped at step 1: the gradient norm is");
        let last = value(&ran.err, "the last checkpoint is ");
        assert!(last.ends_with("checkpoints/step-1"), "{index}: {}", ran.err);
        assert_eq!(steps(&run), [1]);
    }
    let outcome = std::fs::read_to_string(Path::new(&run).join("outcome.json")).expect("reads");
    assert!(outcome.contains("\"ended\": \"stopped\""), "{outcome}");
}

#[test]
fn the_tokenizer_of_the_data_goes_with_the_model() {
    let (folder, recipe) = workplace();
    let words = folder.path().join("words");
    std::fs::create_dir(&words).expect("a folder");
    let tokenizer = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
        "pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,
        "model":{"type":"WordLevel","vocab":{"a":0,"b":1,"[UNK]":2},"unk_token":"[UNK]"}}"#;
    for (name, text) in [
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", "{\"model_max_length\": 24}"),
        ("generation_config.json", "{}"),
        ("notes.txt", "of no use to a model"),
    ] {
        std::fs::write(words.join(name), text).expect("writes");
    }
    std::fs::write(folder.path().join("t.txt"), "a b b a ".repeat(99)).expect("writes");
    let run = path(&folder, "run");
    let sets = ["source=\"text\"", "path=\"t.txt\"", "tokenizer=\"words\""];
    let sets: Vec<String> = sets.iter().map(|set| format!("--set=data.{set}")).collect();
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    let args = [
        &["train", recipe.as_str(), "--out", &run, "--quiet"][..],
        &sets,
    ]
    .concat();
    let ran = bitstep(&args);
    assert_eq!(ran.code, 0, "{}", ran.err);
    let model = Path::new(&run).join("model");
    let entries = std::fs::read_dir(&model).expect("lists");
    let mut names: Vec<String> = entries
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .into_string()
                .expect("text")
        })
        .collect();
    names.sort();
    let expected = [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    assert_eq!(names, expected);
    let written = std::fs::read_to_string(model.join("tokenizer.json")).expect("reads");
    assert_eq!(written, tokenizer);
}

/// A run of many steps, once it has taken its first.
fn long_run(arguments: &[&str]) -> Child {
    let mut child = Command::new(env!("CARGO_BIN_EXE_bitstep"))
        .args(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
    let first = lines
        .map_while(Result::ok)
        .find(|line| line.starts_with("step "));
    assert!(first.is_some(), "no step was taken");
    child
}

fn send(signal: &str, child: &Child) {
    let id = child.id().to_string();
    let sent = Command::new("kill").args([signal, &id]).status();
    assert!(sent.expect("kill starts").success());
}

fn endless(folder: &tempfile::TempDir) -> String {
    let file = folder.path().join("long.toml");
    std::fs::write(&file, TINY.replace("steps = 10", "steps = 1000000")).expect("writes");
    file.display().to_string()
}

#[test]
fn a_signal_ends_a_run_after_its_step_with_a_checkpoint() {
    let (folder, _) = workplace();
    let recipe = endless(&folder);
    for signal in ["-INT", "-TERM"] {
        let run = path(&folder, signal);
        let mut child = long_run(&["train", &recipe, "--out", &run]);
        send(signal, &child);
        assert_eq!(child.wait().expect("ends").code(), Some(6), "{signal}");
        let step = steps(&run)[0];
        assert_eq!(metrics(&run).len() as u64, step);
        assert_goes_on(&folder, &recipe, &run, step + 3);
    }
}

#[test]
fn a_second_signal_ends_the_process_at_once() {
    let (folder, _) = workplace();
    let recipe = folder.path().join("slow.toml");
    let slow = [
        ("steps = 10", "steps = 1000000"),
        ("d_model = 16", "d_model = 512"),
        ("d_ff = 32", "d_ff = 2048"),
        ("batch = 4", "batch = 32"),
        ("seq_len = 24", "seq_len = 128"),
    ];
    let slow = slow
        .iter()
        .fold(TINY.to_owned(), |text, (from, to)| text.replace(from, to));
    std::fs::write(&recipe, slow).expect("writes");
    let run = path(&folder, "run");
    let recipe = recipe.display().to_string();
    let mut child = long_run(&["train", &recipe, "--out", &run, "--threads", "1"]);
    // A step takes far longer than it takes to send both. Signals that are pending together have no order.
    send("-INT", &child);
    std::thread::sleep(Duration::from_millis(200));
    send("-TERM", &child);
    let code = child.wait().expect("ends").code();
    assert_eq!(code, Some(128 + 15));
    assert!(
        steps(&run).is_empty(),
        "nothing was saved in the middle of a step"
    );
}

#[test]
fn a_killed_run_goes_on_from_its_newest_checkpoint() {
    let (folder, _) = workplace();
    let recipe = endless(&folder);
    for (index, pause_ms) in [0, 3, 10, 31, 57, 100].into_iter().enumerate() {
        let run = path(&folder, &format!("killed-{index}"));
        let sets = [
            "--set",
            "checkpoint.every=1",
            "--set",
            "checkpoint.keep_last=2",
        ];
        let args = [&["train", recipe.as_str(), "--out", &run][..], &sets].concat();
        let mut child = long_run(&args);
        // The first checkpoint takes its time where the machine is busy.
        while steps(&run).is_empty() {
            assert!(child.try_wait().expect("waits").is_none(), "still runs");
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(pause_ms));
        send("-KILL", &child);
        child.wait().expect("ends");
        let newest = *steps(&run).last().expect("a checkpoint");
        assert_goes_on(&folder, &recipe, &run, newest + 3);
    }
}

/// The run goes on to `until` steps and has the root of one that never stopped.
fn assert_goes_on(folder: &tempfile::TempDir, recipe: &str, run: &str, until: u64) {
    let until = until.to_string();
    let again = bitstep(&["train", "--resume", run, "--quiet", "--until", &until]);
    assert_eq!(again.code, 0, "{}", again.err);
    let other = tempfile::tempdir_in(folder.path()).expect("a folder");
    let out = other.path().display().to_string();
    let args = ["train", recipe, "--out", &out, "--quiet", "--until", &until];
    let whole = bitstep(&args);
    assert_eq!(value(&again.out, "root "), value(&whole.out, "root "));
    assert_eq!(bits(run), bits(&out));
}

#[test]
fn a_run_goes_on_in_other_passes_with_the_same_bits() {
    let (folder, recipe) = workplace();
    let (whole, parts) = (path(&folder, "whole"), path(&folder, "parts"));
    let grain = ["--set", "data.grain=1", "--quiet"];
    let one = bitstep(&[&["train", &recipe, "--out", &whole][..], &grain].concat());
    assert_eq!(one.code, 0, "{}", one.err);
    let first = [
        &[
            "train",
            &recipe,
            "--out",
            &parts,
            "--until",
            "4",
            "--micro-batch",
            "1",
        ][..],
        &grain,
    ];
    let first = bitstep(&first.concat());
    assert_eq!(first.code, 0, "{}", first.err);
    let second = bitstep(&[
        "train",
        "--resume",
        &parts,
        "--quiet",
        "--micro-batch",
        "2",
        "--recompute",
        "1",
    ]);
    assert_eq!(second.code, 0, "{}", second.err);
    assert_eq!(bits(&parts), bits(&whole));
    assert_eq!(value(&second.out, "root "), value(&one.out, "root "));
    let refused = bitstep(&["train", &recipe, "--micro-batch", "3"]);
    assert_refused(&refused, 2, "data.micro_batch");
}
