//! Devices on the command line: two of them compared, the fall to the CPU, and the memory of a run.

use std::fs;

use bitstep::cuda::device::{first_usable, probe};
use serde_json::Value;

use super::bitstep;

const RECIPE: &str = r#"
name = "pair"
seed = 3
steps = 4
[model]
family = "qwen3"
vocab_size = 64
d_model = 16
n_layers = 1
n_heads = 2
n_kv_heads = 1
d_ff = 24
[data]
batch = 2
seq_len = 16
[optimizer]
lr = 1e-3
"#;

fn recipe() -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("pair.toml");
    fs::write(&path, RECIPE).expect("writes");
    (folder, path.display().to_string())
}

#[test]
fn two_devices_are_compared_op_by_op() {
    let (_folder, recipe) = recipe();
    for pair in ["cpu,cpu", "cpu:scalar,cpu"] {
        let said = bitstep(&["diff", "--devices", pair, &recipe]);
        assert_eq!(said.code, 0, "{said:?}");
        assert!(said.out.contains("identical: every output of"), "{said:?}");
        assert!(said.out.contains("in 2 steps"), "{said:?}");
        assert_eq!(said.err, "step 0: identical\nstep 1: identical\n");
    }
}

#[test]
fn the_comparison_of_devices_is_one_line_of_json() {
    let (_folder, recipe) = recipe();
    let arguments = ["diff", "--devices", "cpu:scalar,cpu", &recipe, "--json"];
    let more = ["--steps", "3", "--threads", "2", "--set", "data.batch=3"];
    let said = bitstep(&[&arguments[..], &more[..]].concat());
    assert_eq!(said.code, 0, "{said:?}");
    assert_eq!(said.out.lines().count(), 1, "{said:?}");
    let line: Value = serde_json::from_str(&said.out).expect("JSON");
    assert_eq!(
        (&line["identical"], &line["steps"]),
        (&true.into(), &3.into())
    );
    assert!(line["difference"].is_null());
    assert!(line["calls"].as_u64().is_some_and(|calls| calls > 30));
    assert_eq!(line["devices"][0], "CPU, scalar, 2 threads");
}

#[test]
fn a_pair_of_devices_that_is_none_is_a_usage_error() {
    let (_folder, recipe) = recipe();
    for pair in ["cpu", "cpu,tpu", "cpu,cpu,cpu", "auto,cpu", "cpu:mmx,cpu"] {
        let said = bitstep(&["diff", "--devices", pair, &recipe]);
        assert_eq!(said.code, 2, "{said:?}");
        let part = format!("devices {pair:?}: expected two of cpu,");
        assert!(said.err.contains(&part), "{said:?}");
    }
    for wrong in [
        &["--devices", "cpu,cpu", "--gemm", "fast"][..],
        &["--devices", "cpu,cpu", "--steps", "0"],
        &["--devices", "cpu,cpu", &recipe],
        &["--steps", "2", &recipe],
        &["--json", &recipe],
        &[],
    ] {
        let said = bitstep(&[&["diff", &recipe], wrong].concat());
        assert_eq!(said.code, 2, "{wrong:?}: {said:?}");
        assert!(said.out.is_empty(), "{wrong:?}: {said:?}");
    }
}

#[test]
fn the_fall_to_the_cpu_is_said_once() {
    let (_folder, recipe) = recipe();
    let fall = |more: &[&str]| {
        let said = bitstep(&[&["train", &recipe, "--quiet", "--steps", "1"], more].concat());
        assert_eq!(said.code, 0, "{said:?}");
        let notes = said
            .err
            .lines()
            .filter(|l| l.contains("computing on the CPU"));
        notes.map(str::to_owned).collect::<Vec<_>>()
    };
    let reason = probe().and_then(|devices| first_usable(&devices)).err();
    let expected = reason.map(|r| format!("note: computing on the CPU: {r}"));
    assert_eq!(fall(&[]), Vec::from_iter(expected));
    assert!(fall(&["--device", "cpu"]).is_empty());
}

#[test]
fn a_device_that_is_not_here_is_a_device_error() {
    let (_folder, recipe) = recipe();
    let said = bitstep(&["train", &recipe, "--device", "cuda:4095"]);
    assert_eq!(said.code, 3, "{said:?}");
    let reason = probe().err().map(|r| r.to_string());
    let reason = reason.unwrap_or_else(|| "cuda:4095 does not exist".into());
    assert!(said.err.contains(&reason), "{said:?}");
}

#[test]
fn doctor_tells_the_gpus_or_why_there_is_none() {
    let said = bitstep(&["doctor"]);
    assert_eq!((said.code, said.err.as_str()), (0, ""), "{said:?}");
    match probe() {
        Err(reason) => assert!(said.out.contains(&reason.to_string()), "{said:?}"),
        Ok(devices) if devices.is_empty() => {
            assert!(said.out.contains("the driver finds no device"), "{said:?}");
        }
        Ok(devices) => {
            for device in devices {
                assert!(said.out.contains(&device.name), "{said:?}");
            }
        }
    }
    assert!(
        said.out
            .contains("every CUDA GPU of compute capability 8.0"),
        "{said:?}"
    );
}

#[test]
fn the_memory_of_a_run_is_told_before_its_first_step() {
    let (_folder, recipe) = recipe();
    let inspected = bitstep(&["inspect", &recipe]);
    let roles: Vec<&str> = inspected
        .out
        .lines()
        .skip_while(|line| *line != "memory by role")
        .collect();
    assert!(roles.len() > 5, "{inspected:?}");
    let train = ["train", &recipe, "--steps", "1", "--device", "cpu"];
    let bench = [
        "bench", &recipe, "--steps", "1", "--device", "cpu", "--json",
    ];
    for command in [&train[..], &bench[..]] {
        let said = bitstep(command);
        assert_eq!(said.code, 0, "{said:?}");
        let table = roles.join("\n");
        assert!(said.err.contains(&table), "{table} is not in {said:?}");
        for part in ["\n  workspace ", "\n  total ", "bytes free of"] {
            assert!(said.err.contains(part), "{part} is not in {said:?}");
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_plan_that_does_not_fit_into_memory_is_refused_before_it_is_allocated() {
    let (_folder, recipe) = recipe();
    let large = [
        "--set",
        "data.batch=4194304",
        "--set",
        "model.d_ff=16384",
        "--device",
        "cpu",
    ];
    let said = bitstep(&[&["train", &recipe], &large[..]].concat());
    assert_eq!(said.code, 3, "{said:?}");
    for part in [
        "the plan needs",
        "of activations",
        "and cpu has",
        "lower data.batch",
    ] {
        assert!(said.err.contains(part), "{part} is not in {said:?}");
    }
}
