//! The commands `train`, `eval`, `generate` and `inspect`.

use std::path::Path;

use serde_json::Value;

use super::{Ran, bitstep};

/// A model that trains ten steps in a blink.
pub const TINY: &str = r#"
name = "tiny"
seed = 3
steps = 10
[model]
family = "llama"
vocab_size = 64
d_model = 16
n_layers = 1
n_heads = 2
d_ff = 32
[data]
batch = 4
seq_len = 24
[optimizer]
lr = 1e-2
"#;

/// A folder with a recipe, and the recipe's path.
pub fn workplace() -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let recipe = folder.path().join("tiny.toml");
    std::fs::write(&recipe, TINY).expect("writes");
    (folder, recipe.display().to_string())
}

pub fn path(folder: &tempfile::TempDir, name: &str) -> String {
    folder.path().join(name).display().to_string()
}

/// What follows `key` on its line of the output.
pub fn value<'a>(text: &'a str, key: &str) -> &'a str {
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    line.unwrap_or_else(|| panic!("no line {key:?} in {text}"))
        .trim()
}

pub fn metrics(folder: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(Path::new(folder).join("metrics.jsonl")).expect("metrics");
    let lines = text.lines().map(serde_json::from_str);
    lines.map(|line| line.expect("each line is JSON")).collect()
}

/// Fails unless the program refused with one line on standard error that has `part` in it.
pub fn assert_refused(ran: &Ran, code: i32, part: &str) {
    assert_eq!(ran.code, code, "{}{}", ran.out, ran.err);
    let last = ran.err.lines().last().unwrap_or_default();
    assert!(
        last.starts_with("error: ") && last.contains(part),
        "{}",
        ran.err
    );
}

/// Text with its hashes and the numbers that depend on bits or time taken out.
fn without_numbers(text: &str) -> String {
    let bits = |w: &str| w.len() >= 8 && w.bytes().all(|b| b.is_ascii_hexdigit());
    let word = |word: &str| match word.trim_end_matches([')', ',']) {
        w if bits(w) => word.replace(w, "<bits>"),
        w if w.contains('.') && w.starts_with(|c: char| c.is_ascii_digit()) => {
            word.replace(w, "<x>")
        }
        _ => word.to_owned(),
    };
    let line = |line: &str| line.split(' ').map(word).collect::<Vec<_>>().join(" ");
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_run_leaves_recipe_manifest_metrics_and_a_model() {
    let (folder, recipe) = workplace();
    let out = path(&folder, "run");
    let ran = bitstep(&[
        "train", &recipe, "--out", &out, "--quiet", "--device", "cpu",
    ]);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{}", ran.out);

    let lines = metrics(&out);
    assert_eq!(lines.len(), 10);
    for (step, line) in lines.iter().enumerate() {
        assert_eq!(line["step"], step);
        let bits = u32::from_str_radix(line["loss_bits"].as_str().unwrap(), 16).unwrap();
        assert_eq!(
            f64::from(f32::from_bits(bits)) as f32,
            line["loss"].as_f64().unwrap() as f32
        );
        assert_eq!(line["phase"], if step < 3 { "eager" } else { "replayed" });
        assert_eq!(line["applied"], true);
    }

    assert!(lines.iter().all(|line| line.get("root").is_none()));

    // Roots that are asked for stand at their steps, eager and replayed, and change nothing.
    let rooted = path(&folder, "rooted");
    let every = ["--set", "digest.every=2", "--quiet"];
    let args = [&["train", recipe.as_str(), "--out", &rooted][..], &every].concat();
    let with_roots = bitstep(&args);
    assert_eq!(with_roots.code, 0, "{}", with_roots.err);
    let lines = metrics(&rooted);
    for (step, line) in lines.iter().enumerate() {
        assert_eq!(line.get("root").is_some(), step % 2 == 1, "step {step}");
    }
    let last = lines[9]["root"].as_str().expect("a root");
    assert!(value(&with_roots.out, "root ").starts_with(last));
    assert_eq!(value(&with_roots.out, "root "), value(&ran.out, "root "));

    // The kept recipe gives the same run.
    let kept = path(&folder, "run/recipe.toml");
    let again = bitstep(&["train", &kept, "--quiet"]);
    for key in ["root ", "manifest ", "final loss "] {
        assert_eq!(value(&again.out, key), value(&ran.out, key));
    }
    assert!(
        again
            .out
            .ends_with("nothing was written: --out DIR keeps the model and the metrics\n")
    );

    let manifest = std::fs::read_to_string(path(&folder, "run/manifest.txt")).unwrap();
    let (hashed, execution) = manifest.split_once("execution\n").unwrap();
    let hash = blake3::hash(hashed.as_bytes()).to_string();
    assert_eq!(hash, value(&ran.out, "manifest "));
    assert!(execution.contains("cpu::adamw."), "{execution}");

    // The model folder holds the weights the run ended with.
    let evaluated = bitstep(&["eval", &recipe, "--model", &path(&folder, "run/model")]);
    for key in ["root ", "validation ", "held-out sums:"] {
        assert_eq!(value(&evaluated.out, key), value(&ran.out, key));
    }
}

#[test]
fn a_run_folder_is_never_overwritten() {
    let (folder, recipe) = workplace();
    let out = path(&folder, "run");
    let train = ["train", &recipe, "--steps", "2", "--quiet", "--out", &out];
    assert_eq!(bitstep(&train).code, 0);
    let before = metrics(&out);
    assert_refused(
        &bitstep(&train),
        2,
        "is not empty, and a run is never overwritten",
    );
    assert_eq!(metrics(&out), before);
}

#[test]
fn threads_and_vector_instructions_change_no_bit() {
    let (_folder, recipe) = workplace();
    let root = |more: &[&str]| {
        let ran = bitstep(&[&["train", &recipe, "--quiet"], more].concat());
        value(&ran.out, "root ").to_owned()
    };
    let one = root(&["--threads", "1"]);
    assert_eq!(one, root(&["--threads", "2"]));
    assert_eq!(one, root(&["--threads", "3", "--simd", "scalar"]));
    assert_ne!(one, root(&["--set", "seed=4"]));
}

#[test]
fn changes_of_the_recipe_take_effect_together_and_slips_are_named() {
    let (_folder, recipe) = workplace();
    let steps = [
        "train",
        &recipe,
        "--quiet",
        "--set",
        "schedule.warmup=11",
        "--steps",
        "12",
    ];
    let ran = bitstep(&steps);
    assert!(
        value(&ran.out, "time ").contains("for 12 steps"),
        "{}{}",
        ran.out,
        ran.err
    );
    let slip = bitstep(&["train", &recipe, "--set", "optimizer.learn_rate=1"]);
    let nearest = "unknown key `optimizer.learn_rate`; the nearest known one is `optimizer.lr`";
    assert_refused(&slip, 2, nearest);
    assert_refused(
        &bitstep(&["train", &recipe, "--set", "steps"]),
        2,
        "expected key=value",
    );
    assert_refused(
        &bitstep(&["train", "absent.toml"]),
        2,
        "cannot read absent.toml",
    );
    let device = bitstep(&["train", &recipe, "--device", "tpu"]);
    assert_refused(
        &device,
        2,
        "unknown device \"tpu\": expected auto, cpu or cuda:N",
    );
}

#[test]
fn a_step_that_is_not_finite_ends_the_run_and_keeps_what_there_is() {
    let (folder, recipe) = workplace();
    let out = path(&folder, "run");
    let ran = bitstep(&[
        "train",
        &recipe,
        "--out",
        &out,
        "--set",
        "optimizer.lr=1e30",
    ]);
    assert_refused(&ran, 5, "training stopped at step 1: the gradient norm is");
    let lines = metrics(&out);
    assert_eq!(lines.len(), 2, "the step that was dropped has its line");
    assert_eq!(lines[1]["applied"], false);
    assert!(lines[1]["grad_norm"].is_null());
    let model = bitstep(&["inspect", &path(&folder, "run/model")]);
    assert_eq!(model.code, 0, "{}", model.err);
}

#[test]
fn a_spike_is_dropped_and_training_goes_on_through_warm_up_and_proof() {
    let (folder, recipe) = workplace();
    let (plain, limited) = (path(&folder, "plain"), path(&folder, "limited"));
    bitstep(&["train", &recipe, "--quiet", "--out", &plain]);
    // The norm of the step that would be proven, so that exactly this one is too large.
    let norm = |line: &Value| line["grad_norm"].as_f64().unwrap();
    let norms: Vec<f64> = metrics(&plain).iter().map(norm).collect();
    let limit = format!("optimizer.spike_norm={}", norms[3] * 0.999);
    let ran = bitstep(&[
        "train", &recipe, "--quiet", "--out", &limited, "--set", &limit,
    ]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    let lines = metrics(&limited);
    assert_eq!(lines.len(), 10);
    let dropped: Vec<&Value> = lines.iter().filter(|l| l["applied"] == false).collect();
    assert!(
        dropped
            .iter()
            .all(|l| l["dropped"][0] == "spike" && norm(l) > norms[3] * 0.999)
    );
    assert!(dropped.iter().any(|l| l["step"] == 3), "{lines:?}");
    assert_eq!(lines[3]["phase"], "eager");
    assert!(
        ran.err.contains("step 3 is dropped: its gradient norm"),
        "{}",
        ran.err
    );
    assert!(value(&ran.out, "dropped ").starts_with(&dropped.len().to_string()));
}

#[test]
fn generation_is_a_function_of_prompt_and_seed() {
    let (folder, recipe) = workplace();
    bitstep(&["train", &recipe, "--quiet", "--out", &path(&folder, "run")]);
    let model = path(&folder, "run/model");
    let generate = |more: &[&str]| {
        let ran = bitstep(&[&["generate", &model, "7+5=", "--tokens", "12"], more].concat());
        assert_eq!(ran.code, 0, "{}", ran.err);
        ran.out
    };
    let greedy = generate(&[]);
    assert!(greedy.starts_with("7+5="), "{greedy}");
    assert_eq!(greedy, generate(&["--threads", "1", "--seed", "9"]));
    let sampled = generate(&["--temperature", "2", "--seed", "9"]);
    assert_eq!(
        sampled,
        generate(&["--temperature", "2", "--seed", "9", "--threads", "1"])
    );
    assert_ne!(sampled, generate(&["--temperature", "2", "--seed", "8"]));
    assert_eq!(greedy, generate(&["--temperature", "2", "--top-k", "1"]));
    let json: Value = serde_json::from_str(&generate(&["--json"])).unwrap();
    assert_eq!(json["prompt_tokens"], serde_json::json!([55, 43, 53, 61]));
    let text = format!("7+5={}\n", json["text"].as_str().unwrap());
    assert_eq!(text, greedy);
}

#[test]
fn generation_stops_at_the_end_of_text() {
    let (folder, recipe) = workplace();
    bitstep(&["train", &recipe, "--quiet", "--out", &path(&folder, "run")]);
    let model = path(&folder, "run/model");
    let json = |model: &str| -> Value {
        let ran = bitstep(&["generate", model, "7+5=", "--tokens", "6", "--json"]);
        serde_json::from_str(&ran.out).unwrap_or_else(|e| panic!("{e}: {}", ran.err))
    };
    let config = Path::new(&model).join("config.json");
    let mut keys: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    assert_eq!(keys["eos_token_id"], 10, "a sum ends with its line");
    keys["eos_token_id"] = Value::Null;
    std::fs::write(&config, keys.to_string()).unwrap();
    let free = json(&model);
    assert_eq!(
        (&free["stopped"], free["tokens"].as_array().unwrap().len()),
        (&"length".into(), 6)
    );
    keys["eos_token_id"] = serde_json::json!([63, free["tokens"][0]]);
    std::fs::write(&config, keys.to_string()).unwrap();
    let ended = json(&model);
    assert_eq!(
        (&ended["stopped"], &ended["text"]),
        (&"eos".into(), &"".into())
    );
}

#[test]
fn prompts_that_do_not_fit_are_refused() {
    let (folder, recipe) = workplace();
    bitstep(&[
        "train",
        &recipe,
        "--quiet",
        "--steps",
        "1",
        "--out",
        &path(&folder, "run"),
    ]);
    let model = path(&folder, "run/model");
    let refused = |more: &[&str]| bitstep(&[&["generate", &model], more].concat());
    assert_refused(
        &refused(&["7+5=", "--tokens", "21"]),
        2,
        "lower --tokens to 20",
    );
    assert_refused(
        &refused(&["x"]),
        2,
        "token 0 is 120, but the model has tokens 0..64",
    );
    assert_refused(&refused(&[""]), 2, "the prompt is empty");
    assert_refused(
        &refused(&["1", "--temperature", "-1"]),
        2,
        "--temperature is -1",
    );
    assert_refused(
        &refused(&["1", "--tokenizer", "absent.json"]),
        4,
        "absent.json",
    );
    assert_refused(
        &bitstep(&["generate", "absent", "1"]),
        4,
        "absent/config.json",
    );
}

#[test]
fn a_text_is_trained_on_and_evaluated_where_it_is_set_aside() {
    let (folder, recipe) = workplace();
    std::fs::write(
        folder.path().join("t.txt"),
        "what is set aside? ".repeat(60),
    )
    .unwrap();
    let text = ["--set", "data.source=text", "--set", "data.path=t.txt"];
    let more = ["--set", "model.vocab_size=128"];
    let common = [&text[..], &more[..]].concat();
    let none = bitstep(&[&["eval", &recipe], &common[..]].concat());
    assert_refused(
        &none,
        2,
        "sets no data aside: add --set data.validation=0.1",
    );
    let out = path(&folder, "run");
    let split = ["--set", "data.validation=0.25", "--out", &out];
    let ran = bitstep(&[&["train", &recipe, "--quiet"], &common[..], &split[..]].concat());
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert!(
        value(&ran.out, "validation ").contains("perplexity"),
        "{}",
        ran.out
    );
    assert!(!ran.out.contains("sums"), "{}", ran.out);
    // The kept recipe finds its text from the run's folder.
    let kept = path(&folder, "run/recipe.toml");
    let again = bitstep(&["eval", &kept, "--model", &path(&folder, "run/model")]);
    assert_eq!(
        value(&again.out, "validation "),
        value(&ran.out, "validation ")
    );
}

#[test]
fn inspect_shows_a_recipe_and_its_model_folder() {
    let (folder, recipe) = workplace();
    let shown = bitstep(&["inspect", &recipe, "--params"]);
    insta::assert_snapshot!("inspect", without_numbers(&shown.out));
    let manifest = bitstep(&["inspect", &recipe, "--manifest"]);
    let hash = blake3::hash(manifest.out.as_bytes()).to_string();
    assert_eq!(hash, value(&shown.out, "manifest "));
    bitstep(&[
        "train",
        &recipe,
        "--quiet",
        "--steps",
        "1",
        "--out",
        &path(&folder, "run"),
    ]);
    let model = path(&folder, "run/model");
    let of_folder = bitstep(&["inspect", &model]);
    for key in ["model ", "parameters "] {
        assert_eq!(value(&of_folder.out, key), value(&shown.out, key));
    }
    let refused = bitstep(&["inspect", &model, "--set", "steps=3"]);
    assert_refused(&refused, 2, "leave --set out");
}

#[test]
fn inspect_shows_what_a_form_saves_and_costs() {
    let (_folder, recipe) = workplace();
    let grain = ["--set", "data.grain=1"];
    let form = ["--set", "data.micro_batch=1", "--set", "memory.recompute=1"];
    let shown = bitstep(&[&["inspect", &recipe][..], &grain, &form].concat());
    let plain = bitstep(&[&["inspect", &recipe][..], &grain].concat());
    let said = value(&shown.out, "form ");
    assert_eq!(said, "passes of 1 sequences, recomputation of each layer");
    assert!(
        value(&shown.out, "programs ").contains("passes of"),
        "{}",
        shown.out
    );
    let time: f64 = value(&shown.out, "time ")
        .split(' ')
        .next()
        .unwrap_or_default()
        .parse()
        .expect("a number");
    assert!(time > 1.0 && time < 1.5, "{time}");
    let memory = value(&shown.out, "memory ");
    assert!(
        memory.contains(" within a step, ") && memory.contains(" instead of "),
        "{memory}"
    );
    assert!(!plain.out.contains("\nform "), "{}", plain.out);
}

#[test]
fn the_text_of_a_run() {
    let (_folder, recipe) = workplace();
    let cpu = ["--device", "cpu", "--threads", "1", "--simd", "scalar"];
    let ran = bitstep(&[&["train", &recipe], &cpu[..]].concat());
    // The time is never the same, and answers after ten steps belong to no text.
    let changing = |line: &&str| line.starts_with("time ") || line.starts_with("  ");
    let lines: Vec<&str> = ran.out.lines().filter(|l| !changing(l)).collect();
    let hits = value(&ran.out, "validation ").split(", ").last();
    let text = without_numbers(&lines.join("\n").replace(hits.unwrap_or_default(), "<hits>"));
    insta::assert_snapshot!("train_output", text);
    let introduction = ran.err.lines().next().unwrap_or_default();
    insta::assert_snapshot!("train_introduction", introduction);
}

#[test]
fn the_help_of_each_command() {
    for command in ["train", "eval", "generate", "inspect"] {
        let help = bitstep(&[command, "--help"]);
        assert_eq!(help.code, 0);
        insta::assert_snapshot!(format!("help_{command}"), help.out);
    }
    let top = bitstep(&["--help"]);
    assert!(
        top.out
            .contains("5  training stopped on a non-finite loss or gradient norm")
    );
    assert_eq!(bitstep(&["train"]).code, 2);
    assert_eq!(bitstep(&["train", "--no-such-option"]).code, 2);
}

#[test]
fn a_training_run_has_the_root_of_its_recipes_golden() {
    let (folder, _) = workplace();
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/llama-tiny.toml");
    let golden = recipe.with_extension("golden");
    let golden = bitstep::golden::GoldenFile::read(&golden).expect("the golden");
    let last = golden.steps.last().expect("steps");
    let (recipe, out) = (recipe.display().to_string(), path(&folder, "run"));
    let every = format!("digest.every={}", golden.steps.len());
    let set = ["--set", &every, "--set", "checkpoint.save_model=false"];
    let args = [
        &["train", &recipe, "--out", &out, "--device", "cpu"][..],
        &set,
    ]
    .concat();
    let ran = bitstep(&args);
    assert_eq!(ran.code, 0, "{}", ran.err);
    let line = &metrics(&out)[golden.steps.len() - 1];
    assert_eq!(line["root"].as_str(), Some(last.root.to_hex().as_str()));
}
