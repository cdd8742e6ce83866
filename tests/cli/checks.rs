//! verify, bless, diff, parity and doctor.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::{Ran, bitstep};
use crate::gpu;

const RECIPE: &str = r#"
name = "small"
seed = 3
steps = 8

[model]
family = "llama"
vocab_size = 64
d_model = 16
n_layers = 1
n_heads = 2
n_kv_heads = 1
d_ff = 24

[data]
batch = 4
seq_len = 16

[optimizer]
lr = 1e-3

[golden]
steps = 6
trace_steps = 2
"#;

/// A folder with a recipe, and its golden when `blessed` ran.
struct Case {
    folder: tempfile::TempDir,
}

impl Case {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("small.toml"), RECIPE).expect("writes");
        Case { folder }
    }

    fn blessed() -> Self {
        let case = Case::new();
        let said = case.bless("the first one");
        assert_eq!(said.code, 0, "{said:?}");
        case
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn bless(&self, because: &str) -> Ran {
        bitstep(&["bless", &self.path("small.toml"), "--because", because])
    }

    fn verify(&self, more: &[&str]) -> Ran {
        let golden = self.path("small.golden");
        let mut arguments = vec!["verify", &golden];
        arguments.extend(more);
        bitstep(&arguments)
    }

    fn golden(&self) -> String {
        fs::read_to_string(self.path("small.golden")).expect("reads")
    }

    /// Rewrites the golden's lines.
    fn edit(&self, change: impl Fn(&str) -> Option<String>) {
        let golden = self.golden();
        let lines: Vec<String> = golden.lines().filter_map(change).collect();
        fs::write(self.path("small.golden"), lines.join("\n")).expect("writes");
    }
}

#[test]
fn a_blessed_golden_verifies_in_every_way() {
    let case = Case::blessed();
    for more in [
        &[][..],
        &["--threads", "1"],
        &["--threads", "3", "--simd", "scalar"],
    ] {
        let said = case.verify(more);
        assert_eq!(said.code, 0, "{said:?}");
        assert!(said.out.contains("identical (6 steps, root "), "{said:?}");
    }
    let verbose = case.verify(&["--verbose"]);
    assert!(
        verbose.out.contains("because  the first one"),
        "{verbose:?}"
    );
    assert!(
        verbose.out.contains("excludes time and memory"),
        "{verbose:?}"
    );
    assert!(!Path::new(&case.path("small.golden.new")).exists());
}

#[test]
fn a_flipped_bit_is_found_with_step_tensor_op_and_index() {
    let case = Case::blessed();
    let said = case.verify(&["--flip", "3:model.norm.weight:5:0"]);
    assert_eq!(said.code, 1, "{said:?}");
    for part in [
        "differs at step 3",
        "tensor   model.norm.weight",
        "op       rms_norm",
        "index    5: expected 3f",
        "bit 0 of model.norm.weight[5] before step 3",
    ] {
        assert!(said.out.contains(part), "{part} is not in {}", said.out);
    }
    assert!(!Path::new(&case.path("small.golden.new")).exists());
}

#[test]
fn a_flip_that_cannot_be_made_is_a_usage_error() {
    let case = Case::blessed();
    for (flip, text) in [
        ("9:model.norm.weight:5:0", "a step from 0 to 5"),
        ("3:model.norm.weight:99:0", "has 16 elements"),
        (
            "3:model.norn.weight:5:0",
            "the nearest is model.norm.weight",
        ),
        ("3:model.norm.weight:5", "STEP:TENSOR:INDEX:BIT"),
    ] {
        let said = case.verify(&["--flip", flip]);
        assert_eq!(said.code, 2, "{said:?}");
        assert!(said.err.contains(text), "{said:?}");
    }
}

#[test]
fn a_changed_golden_differs_and_the_run_is_left_beside_it() {
    let case = Case::blessed();
    let before = case.golden();
    case.edit(|line| {
        let line = match line.starts_with("step 4 ") {
            true => line
                .replace(" norm 3", " norm 4")
                .replace(" norm 4", " norm 5"),
            false => line.to_owned(),
        };
        Some(line)
    });
    assert_ne!(case.golden().trim(), before.trim());
    let said = case.verify(&[]);
    assert_eq!(said.code, 1, "{said:?}");
    assert!(
        said.out.contains("differs at step 4: gradient norm"),
        "{said:?}"
    );
    let fresh = fs::read_to_string(case.path("small.golden.new")).expect("was written");
    assert_eq!(fresh, before);
}

#[test]
fn a_damaged_golden_is_refused_with_its_line() {
    let case = Case::blessed();
    let number = case.golden().lines().position(|l| l.starts_with("step 2"));
    let number = number.expect("a line") + 1;
    case.edit(|line| Some(line.replace("step 2 loss", "step 2 lost")));
    let said = case.verify(&[]);
    assert_eq!(said.code, 4, "{said:?}");
    assert!(said.err.contains(&format!("line {number}:")), "{said:?}");
}

#[test]
fn a_golden_that_compares_nothing_is_refused() {
    let case = Case::blessed();
    case.edit(|line| {
        let header = !["step", "tensor", "op"].contains(&line.split(' ').next()?);
        header.then(|| line.to_owned())
    });
    let said = case.verify(&[]);
    assert_eq!(said.code, 4, "{said:?}");
    assert!(said.err.contains("holds no step"), "{said:?}");
}

#[test]
fn a_domain_that_cannot_be_proven_is_named_and_does_not_hide_the_others() {
    let case = Case::blessed();
    let golden = case.golden();
    let foreign = golden.replace("domain f32", "domain bf16.sm80");
    fs::write(case.path("foreign.golden"), foreign).expect("writes");
    let paths = [case.path("foreign.golden"), case.path("small.golden")];
    let said = bitstep(&["verify", &paths[0], &paths[1]]);
    assert_eq!(said.code, 3, "{said:?}");
    assert!(
        said.err.contains("domain bf16.sm80 cannot be proven"),
        "{said:?}"
    );
    assert!(said.out.contains("small.golden: identical"), "{said:?}");
}

#[test]
fn a_golden_of_each_domain_verifies_and_a_flipped_bit_trips() {
    for precision in ["tf32", "bf16", "f16"] {
        let case = Case::new();
        let recipe = format!("precision = {precision:?}\n{RECIPE}");
        fs::write(case.path("small.toml"), recipe).expect("writes");
        let said = case.bless("the first of its domain");
        assert_eq!(said.code, 0, "{said:?}");
        let domain = format!("domain {precision}.sm90");
        assert!(case.golden().contains(&domain), "{domain}");
        let said = case.verify(&[]);
        assert!(said.out.contains("identical"), "{said:?}");
        let said = case.verify(&["--flip", "1:model.norm.weight:0:20"]);
        assert_eq!(said.code, 1, "{said:?}");
        assert!(said.out.contains("model.norm.weight"), "{said:?}");
    }
}

#[test]
fn blessing_is_refused_without_a_reason_and_in_ci() {
    let case = Case::new();
    let silent = case.bless("  ");
    assert_eq!(silent.code, 2, "{silent:?}");
    assert!(silent.err.contains("--because"), "{silent:?}");
    let recipe = case.path("small.toml");
    let mut in_ci = Command::new(env!("CARGO_BIN_EXE_bitstep"));
    let in_ci = in_ci.args(["bless", &recipe, "--because", "x"]);
    let ci = in_ci
        .env("CI", "true")
        .output()
        .expect("the program starts");
    assert_eq!(ci.status.code(), Some(2), "{ci:?}");
    let said = String::from_utf8_lossy(&ci.stderr);
    assert!(said.contains("CI is set"), "{said}");
    assert!(!Path::new(&case.path("small.golden")).exists());
}

#[test]
fn blessing_again_changes_nothing_and_a_new_recipe_replaces() {
    let case = Case::blessed();
    let first = case.golden();
    let again = case.bless("another reason");
    assert!(
        again.out.contains("identical, nothing changed"),
        "{again:?}"
    );
    assert_eq!(case.golden(), first);
    let recipe = RECIPE.replace("lr = 1e-3", "lr = 2e-3");
    fs::write(case.path("small.toml"), recipe).expect("writes");
    let verify = case.verify(&[]);
    assert_eq!(verify.code, 1, "{verify:?}");
    assert!(verify.out.contains("recipe hash"), "{verify:?}");
    let replaced = case.bless("twice the\nlearning rate");
    assert_eq!(replaced.code, 0, "{replaced:?}");
    for part in [
        "replaced",
        "recipe hash",
        "without the header it differs at step 0",
    ] {
        assert!(replaced.out.contains(part), "{part} is not in {replaced:?}");
    }
    assert!(
        case.golden()
            .contains("\nbecause twice the learning rate\n")
    );
    assert_eq!(case.verify(&[]).code, 0);
}

#[test]
fn goldens_are_compared_by_diff() {
    let case = Case::blessed();
    let (old, new) = (case.path("small.golden"), case.path("other.golden"));
    fs::copy(&old, &new).expect("copies");
    let same = bitstep(&["diff", &old, &new]);
    assert_eq!(same.code, 0, "{same:?}");
    assert!(same.out.contains("identical"), "{same:?}");
    let changed = case
        .golden()
        .replacen("\ntensor lm_head.weight ", "\ntensor other ", 1);
    fs::write(&new, changed).expect("writes");
    let differs = bitstep(&["diff", &old, &new]);
    assert_eq!(differs.code, 1, "{differs:?}");
    assert!(
        differs.out.contains("tensor   lm_head.weight"),
        "{differs:?}"
    );
}

#[test]
fn manifests_are_compared_by_diff_and_the_execution_is_a_note() {
    let case = Case::new();
    let program = "schema 1\ncontract 1\ndomain f32\narena 256 bytes\nslots\ncalls\n  0 embed\n";
    let files = [
        ("a", format!("{program}execution\n  0 cpu::embed.avx2\n")),
        ("b", format!("{program}execution\n  0 cpu::embed.scalar\n")),
        ("c", program.replace("256", "512")),
    ];
    for (name, text) in &files {
        fs::create_dir(case.path(name)).expect("creates");
        fs::write(case.path(&format!("{name}/manifest.txt")), text).expect("writes");
    }
    let (a, b, c) = (case.path("a"), case.path("b/manifest.txt"), case.path("c"));
    let note = bitstep(&["diff", &a, &b]);
    assert_eq!(note.code, 0, "{note:?}");
    assert!(
        note.out.contains("only the execution section differs"),
        "{note:?}"
    );
    assert!(note.out.contains("line 9"), "{note:?}");
    let differs = bitstep(&["diff", &a, &c]);
    assert_eq!(differs.code, 1, "{differs:?}");
    assert!(differs.out.contains("arena 512 bytes"), "{differs:?}");
    assert!(differs.out.contains("line 4"), "{differs:?}");
}

#[test]
fn diff_refuses_what_it_cannot_compare() {
    let case = Case::blessed();
    let (golden, recipe) = (case.path("small.golden"), case.path("small.toml"));
    let unknown = bitstep(&["diff", &golden, &recipe]);
    assert_eq!(unknown.code, 4, "{unknown:?}");
    assert!(
        unknown.err.contains("neither a golden nor a manifest"),
        "{unknown:?}"
    );
    let manifest = case.path("manifest.txt");
    fs::write(
        &manifest,
        "schema 1\ncontract 1\ndomain f32\narena 0 bytes\n",
    )
    .expect("writes");
    let kinds = bitstep(&["diff", &golden, &manifest]);
    assert_eq!(kinds.code, 2, "{kinds:?}");
    assert!(kinds.err.contains("expected two of one kind"), "{kinds:?}");
    let missing = bitstep(&["diff", &golden, &case.path("none")]);
    assert_eq!(missing.code, 4, "{missing:?}");
}

fn fixture(name: &str) -> String {
    format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn parity_holds_on_every_recorded_model() {
    for name in [
        "llama-gqa",
        "llama-tied",
        "qwen2-bias",
        "qwen3-qknorm",
        "lora-qv",
        "qlora-nf4-all",
    ] {
        let said = bitstep(&["parity", &fixture(name)]);
        assert_eq!(said.code, 0, "{said:?}");
        assert!(said.out.contains("parity holds"), "{said:?}");
    }
}

#[test]
fn parity_fails_beyond_each_tolerance() {
    let folder = fixture("llama-gqa");
    for (flag, kind) in [
        ("--tolerance-logits", "logits"),
        ("--tolerance-gradients", "gradient"),
        ("--tolerance-losses", "loss"),
        ("--tolerance-norms", "grad norm"),
        ("--tolerance-change", "change"),
    ] {
        let said = bitstep(&["parity", &folder, flag, "1e-30"]);
        assert_eq!(said.code, 1, "{said:?}");
        let beyond = |line: &str| line.starts_with(kind) && line.ends_with("BEYOND");
        assert!(said.out.lines().any(beyond), "{said:?}");
    }
}

#[test]
fn parity_refuses_records_of_adapters_that_are_not_there() {
    let folder = tempfile::tempdir().expect("a folder");
    let record = "reference.json";
    let from = Path::new(&fixture("lora-qv")).join(record);
    fs::copy(from, folder.path().join(record)).expect("copies");
    let said = bitstep(&["parity", &folder.path().display().to_string()]);
    assert_eq!(said.code, 4, "{said:?}");
    assert!(said.err.contains("no folder `adapter`"), "{said:?}");
}

#[test]
fn doctor_says_what_is_here_and_never_fails() {
    let said = bitstep(&["doctor"]);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(said.err.is_empty(), "{said:?}");
    for part in ["CPU", "CUDA", "f32", "scalar"] {
        assert!(said.out.contains(part), "{part} is not in {said:?}");
    }
}

#[test]
fn bench_prints_one_line_of_json() {
    let case = Case::new();
    let said = bitstep(&[
        "bench",
        &case.path("small.toml"),
        "--device",
        "cpu",
        "--steps",
        "3",
        "--json",
        "--profile",
    ]);
    assert_eq!(said.code, 0, "{said:?}");
    assert_eq!(said.out.lines().count(), 1, "{said:?}");
    let line: serde_json::Value = serde_json::from_str(&said.out).expect("JSON");
    for key in [
        "replayed_ms_p50",
        "eager_ms_p95",
        "tokens_per_s",
        "guard_us",
        "guard_share",
        "digest_gb_per_s",
        "digest_ms",
        "bandwidth_bytes_per_s",
        "roofline_ms",
        "share_of_roofline",
        "tflop_per_s",
        "first_replay_ms",
    ] {
        assert!(line[key].as_f64().is_some_and(|x| x > 0.0), "{key}: {line}");
    }
    assert!(
        line["profile"].as_array().is_some_and(|ops| ops.len() > 5),
        "{line}"
    );
}

#[test]
fn bench_profiles_by_op_and_by_sizes_with_equal_sums() {
    let case = Case::new();
    let recipe = case.path("small.toml");
    let said = bitstep(&[
        "bench",
        &recipe,
        "--device",
        "cpu",
        "--steps",
        "2",
        "--json",
        "--profile",
    ]);
    let line: serde_json::Value = serde_json::from_str(&said.out).expect("JSON");
    let sum = |list: &str, key: &str| -> f64 {
        let rows = line[list].as_array().expect("rows").iter();
        rows.map(|row| row[key].as_f64().expect("a number")).sum()
    };
    for key in ["ms", "calls", "flop", "bytes", "limit_ms", "share"] {
        let (ops, sizes) = (sum("profile", key), sum("profile_by_size", key));
        assert!(
            ops > 0.0 && (ops / sizes - 1.0).abs() < 1e-9,
            "{key}: {line}"
        );
    }
    assert!((sum("profile", "share") - 1.0).abs() < 1e-9, "{line}");
    assert_eq!(line["flop_per_step"].as_f64(), Some(sum("profile", "flop")));
    let (limit, rows) = (line["roofline_ms"].as_f64(), sum("profile", "limit_ms"));
    assert!(
        (limit.expect("a limit") / rows - 1.0).abs() < 1e-9,
        "{line}"
    );
}

#[test]
fn bench_times_graph_and_ops_by_the_clock_of_a_gpu() {
    if gpu::backend().is_none() {
        return;
    }
    let case = Case::new();
    let recipe = case.path("small.toml");
    let said = bitstep(&[
        "bench",
        &recipe,
        "--device",
        "cuda:0",
        "--steps",
        "3",
        "--json",
        "--profile",
    ]);
    assert_eq!(said.code, 0, "{said:?}");
    assert_eq!(said.out.lines().count(), 1, "{said:?}");
    let line: serde_json::Value = serde_json::from_str(&said.out).expect("JSON");
    for key in ["graph_ms_p50", "graph_nodes", "device_bytes", "roofline_ms"] {
        assert!(line[key].as_f64().is_some_and(|x| x > 0.0), "{key}: {line}");
    }
    let rows = line["profile"].as_array().expect("rows");
    let timed = |row: &serde_json::Value| row["ms"].as_f64().is_some_and(|x| x > 0.0);
    assert!(rows.len() > 5 && rows.iter().all(timed), "{line}");
}

#[test]
fn a_recipe_that_trains_nothing_is_not_blessed() {
    let case = Case::new();
    let recipe = RECIPE.replace("lr = 1e-3", "lr = 1e38");
    fs::write(case.path("small.toml"), recipe).expect("writes");
    let said = case.bless("it ran");
    assert_eq!(said.code, 5, "{said:?}");
    assert!(said.err.contains("nothing was trained"), "{said:?}");
    assert!(!Path::new(&case.path("small.golden")).exists());
}

#[test]
fn sizes_without_end_are_refused_at_once() {
    let case = Case::new();
    let recipe = case.path("small.toml");
    for set in ["model.n_layers=1000000000", "data.batch=1000000000"] {
        let said = bitstep(&["inspect", &recipe, "--set", set]);
        assert_eq!(said.code, 2, "{set}: {said:?}");
        assert!(said.err.contains("expected"), "{set}: {said:?}");
    }
    let both = [
        "--set",
        "data.seq_len=1000000000",
        "--set",
        "model.max_seq_len=1000000000",
    ];
    let said = bitstep(&[&["inspect", recipe.as_str()], both.as_slice()].concat());
    assert_eq!(said.code, 2, "{said:?}");
}

#[test]
fn a_sequence_longer_than_the_folders_positions_is_refused() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/llama-gqa");
    let case = Case::new();
    let model = RECIPE.find("family").expect("a model")..RECIPE.find("[data]").expect("data");
    let mut recipe = RECIPE.replace(&RECIPE[model], &format!("path = {folder:?}\n\n"));
    recipe = recipe.replace("seq_len = 16", "seq_len = 65");
    fs::write(case.path("small.toml"), recipe).expect("writes");
    let said = bitstep(&["inspect", &case.path("small.toml")]);
    assert_eq!(said.code, 2, "{said:?}");
    assert!(said.err.contains("the model's positions = 64"), "{said:?}");
}

#[test]
fn options_that_make_no_sense_are_usage_errors() {
    let case = Case::new();
    let recipe = case.path("small.toml");
    let options = [
        ["--threads", "0"],
        ["--threads", "100000"],
        ["--simd", "mmx"],
        ["--device", "tpu"],
        ["--device", "cuda:x"],
        ["--gemm", "fast"],
    ];
    for option in options {
        let said = bitstep(&["train", &recipe, "--device", "cpu", option[0], option[1]]);
        let repeated = option[0] == "--device";
        let said = match repeated {
            true => bitstep(&["train", &recipe, option[0], option[1]]),
            false => said,
        };
        assert_eq!(said.code, 2, "{option:?}: {said:?}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn results_that_cannot_be_written_are_an_error() {
    let case = Case::new();
    let full = fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .expect("the device");
    let status = Command::new(env!("CARGO_BIN_EXE_bitstep"))
        .args(["inspect", &case.path("small.toml")])
        .stdout(full)
        .status()
        .expect("the program starts");
    assert_eq!(status.code(), Some(4));
}
