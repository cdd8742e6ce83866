//! The scripts of `benches/`, with programs that only say what a script has to judge, and short runs of those of
//! `tests/`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// Runs `benches/sanitize.sh` with a sanitizer whose tools print and return what `says` gives for each; all of them
/// where `tools` is empty.
fn sanitize_by(tools: &str, says: impl Fn(&str) -> (&'static str, i32)) -> (i32, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = folder.path().join("sanitizer");
    let all = ["memcheck", "racecheck", "initcheck", "synccheck"];
    let cases = all.map(|tool| {
        let (text, code) = says(tool);
        format!("{tool}) printf '{text}\\n'; exit {code} ;;\n")
    });
    let script = format!("#!/bin/sh\ncase $2 in\n{}esac\n", cases.concat());
    fs::write(&fake, script).expect("writes");
    fs::set_permissions(&fake, fs::Permissions::from_mode(0o755)).expect("allows");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new("sh")
        .arg(root.join("benches/sanitize.sh"))
        .env("COMPUTE_SANITIZER", &fake)
        .env("TOOLS", tools)
        .output()
        .expect("a shell");
    let out = String::from_utf8(output.stdout).expect("text");
    (output.status.code().expect("ends by itself"), out)
}

fn sanitize(says: impl Fn(&str) -> (&'static str, i32)) -> (i32, String) {
    sanitize_by("", says)
}

const CLEAN: &str = "a.golden: identical\\n===== ERROR SUMMARY: 0 errors";
const NO_RACE: &str = "a.golden: identical\\n\
    ===== RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)";

fn clean(tool: &str) -> (&'static str, i32) {
    let race = tool == "racecheck";
    (if race { NO_RACE } else { CLEAN }, 0)
}

/// The exit code when `tool` says `found` and the others are clean.
fn outcome(tool: &str, found: (&'static str, i32)) -> i32 {
    sanitize(|t| if t == tool { found } else { clean(t) }).0
}

#[test]
fn four_clean_tools_are_clean_and_all_summaries_are_printed() {
    let (code, out) = sanitize(clean);
    assert_eq!(code, 0, "{out}");
    assert_eq!(out.matches("SUMMARY").count(), 4, "{out}");
}

#[test]
fn only_the_tools_that_are_named_run() {
    let finds = |tool: &str| match tool {
        "racecheck" => ("===== RACECHECK SUMMARY: 1 hazard displayed", 99),
        _ => clean(tool),
    };
    let (code, out) = sanitize_by("memcheck synccheck", finds);
    assert_eq!((code, out.matches("SUMMARY").count()), (0, 2), "{out}");
    assert_eq!(sanitize_by("synccheck racecheck", finds).0, 1);
    // What is no tool gives no clean result.
    assert_eq!(sanitize_by("nothing", finds).0, 2);
}

#[test]
fn one_finding_of_any_tool_is_a_finding() {
    for tool in ["memcheck", "initcheck", "synccheck"] {
        let found = "a.golden: identical\\n===== ERROR SUMMARY: 1 error";
        assert_eq!(outcome(tool, (found, 99)), 1, "{tool}");
        assert_eq!(outcome(tool, (found, 0)), 1, "{tool}, whatever its code");
    }
    let hazard = "a.golden: identical\\n\
        ===== RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)";
    assert_eq!(outcome("racecheck", (hazard, 0)), 1);
}

#[test]
fn a_tool_that_did_not_run_to_its_end_is_not_clean() {
    let cases = [
        ("Device not supported", 1),
        ("", 0),
        ("===== ERROR SUMMARY: 0 errors", 0),
        ("a.golden: differs\\n===== ERROR SUMMARY: 0 errors", 1),
    ];
    for found in cases {
        assert_eq!(outcome("memcheck", found), 2, "{found:?}");
    }
    let other_tool = ("a.golden: identical\\n===== ERROR SUMMARY: 0 errors", 0);
    assert_ne!(outcome("racecheck", other_tool), 0);
}

/// Runs `benches/processes.sh` for `processes` of a program that is this shell script, on one golden; its exit code and
/// what it printed. `$LAST` is a file that the script may use to tell its runs apart.
fn processes(script: &str, processes: &str) -> (i32, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("program");
    fs::write(&program, format!("#!/bin/sh\n{script}\n")).expect("writes");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("allows");
    let golden = folder.path().join("a.golden");
    fs::write(&golden, "a golden").expect("writes");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new("sh")
        .arg(root.join("benches/processes.sh"))
        .arg(&program)
        .arg(processes)
        .arg(&golden)
        .env("LAST", folder.path().join("last"))
        .env("BESIDE", "2")
        .output()
        .expect("a shell");
    let out = String::from_utf8(output.stdout).expect("text");
    (output.status.code().expect("ends by itself"), out)
}

/// What `bitstep verify` prints where all bits are those of the golden.
const IDENTICAL: &str =
    "echo \"$2: identical (20 steps, root ab12…, covers loss, norm and root of every step)\"";

#[test]
fn processes_that_all_have_the_bits_are_counted() {
    let (code, out) = processes(IDENTICAL, "5");
    assert_eq!(code, 0, "{out}");
    assert!(
        out.contains("identical in 5 of 5 processes, root ab12"),
        "{out}"
    );
}

#[test]
fn one_process_with_other_bits_or_no_verdict_is_noticed() {
    // The first of three to make the folder is the one that goes wrong.
    let others = [
        "echo \"$2: differs at step 3\"; exit 1",
        "echo \"$2: identical\"; exit 3",
        "exit 0",
    ];
    for other in others {
        let script = format!("if mkdir \"$LAST\"; then {other}; else {IDENTICAL}; fi");
        let (code, out) = processes(&script, "3");
        assert_eq!(code, 1, "{other}: {out}");
        assert!(
            out.contains("identical in 2 of 3 processes"),
            "{other}: {out}"
        );
    }
    let script = format!("{IDENTICAL}; mkdir \"$LAST\" && exit 4; exit 0");
    let (code, out) = processes(&script, "3");
    assert_eq!(code, 1, "an exit code beside the right verdict: {out}");
}

#[test]
fn processes_of_no_number_are_an_error_of_the_arguments() {
    for count in ["0", "many", ""] {
        assert_eq!(processes(IDENTICAL, count).0, 2, "{count}");
    }
}

/// Runs `benches/loss_curves.py` with a program whose runs have 40 steps and in each the loss that the shell makes of
/// its number `$i` and the run's name `$name`, in thousandths; its exit code and what it printed. `None` without Python.
fn loss_curves(loss: &str, arguments: &[&str]) -> Option<(i32, String)> {
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("program");
    let line = r#"{"step":%d,"loss":%d,"applied":true}\n"#;
    let script = format!(
        "#!/bin/sh\nname=${{4##*/}}; mkdir \"$4\"; i=0\nwhile [ $i -lt 40 ]; do {loss}\n\
         printf '{line}' $i $loss; i=$((i + 1)); done > \"$4/metrics.jsonl\"\n"
    );
    fs::write(&program, script).expect("writes");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("allows");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new("python3")
        .arg(root.join("benches/loss_curves.py"))
        .arg(folder.path().join("runs"))
        .arg("--train")
        .arg(&program)
        .args(arguments)
        .output();
    let Ok(output) = output else {
        eprintln!("skipped: no python3");
        return None;
    };
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8(said).expect("text");
    Some((output.status.code().expect("ends by itself"), said))
}

#[test]
fn loss_curves_hold_precisions_against_the_limit_and_beside_runs_that_differ_harmlessly() {
    // bf16 is 2 % off at one step, f16 half a percent at all, a run in f32 3 % at one step.
    let loss = "loss=1000; case $name$i in bf167) loss=1020 ;; f16*) loss=1005 ;; 'f32 a.b=1'9) loss=970 ;; esac";
    let harmless = ["--harmless", "a.b=1", "a.b=2"];
    let Some((code, said)) = loss_curves(loss, &harmless) else {
        return;
    };
    assert_eq!(code, 1, "a harmless run as far off excuses nothing: {said}");
    for line in [
        "single steps, limit 1.000%: tf32 within, bf16 beyond, f16 within",
        "means of 20 steps, limit 1.000%: tf32 within, bf16 within, f16 within",
        "single steps, runs in f32 that differ harmlessly: largest 3.000% (a.b=1), 0.000% (a.b=2), beyond 1.000%",
        "single steps: bf16 deviates by no more than the widest of these (0.67 times)",
        "means of 20 steps: f16 deviates by more than any of these (3.33 times)",
    ] {
        assert!(said.contains(line), "{line}: {said}");
    }
    let all_within = "loss=1000; case $name$i in *7) loss=1009 ;; esac";
    let (code, said) = loss_curves(all_within, &[]).expect("as before");
    assert_eq!(code, 0, "{said}");
    assert!(!said.contains("harmless"), "{said}");
    let (code, said) = loss_curves("loss=1000; [ $i != 9 ] || exit 3", &[]).expect("as before");
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("f32: exit code 3"), "{said}");
}

/// Runs a script of `tests/` with the built program; its exit code and what it said.
fn of_tests(name: &str, arguments: &[&str]) -> (i32, String) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new("bash")
        .arg(root.join("tests").join(name))
        .args(arguments)
        .env("BITSTEP", env!("CARGO_BIN_EXE_bitstep"))
        .env_remove("CI")
        .output()
        .expect("a shell");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8(said).expect("text");
    (output.status.code().expect("ends by itself"), said)
}

#[test]
fn runs_killed_at_random_moments_end_with_the_goldens_root() {
    let (code, said) = of_tests("kill.sh", &["12", "5"]);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("kills 12: "), "{said}");
}

#[test]
fn a_full_and_a_read_only_disk_end_a_run_with_its_last_checkpoint_named() {
    let (code, said) = of_tests("disk.sh", &["4"]);
    if code == 77 {
        eprintln!("skipped: {said}");
        return;
    }
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("disk full at 4 offsets"), "{said}");
    assert!(said.contains("read-only disk: code 4"), "{said}");
}

#[test]
fn the_scripts_notice_a_program_that_loses_bits_or_its_exit_code() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = folder.path().join("fake");
    // It runs the program and changes a digit of every root that it prints.
    let script = "#!/bin/sh\n\"$REAL\" \"$@\" > \"$0.out\" || exit 1\nsed 's/^\\(root  *\\)./\\1x/' \"$0.out\"\n";
    fs::write(&fake, script).expect("writes");
    fs::set_permissions(&fake, fs::Permissions::from_mode(0o755)).expect("allows");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for name in ["kill.sh", "disk.sh"] {
        let output = Command::new("bash")
            .arg(root.join("tests").join(name))
            .arg("1")
            .env("BITSTEP", &fake)
            .env("REAL", env!("CARGO_BIN_EXE_bitstep"))
            .output()
            .expect("a shell");
        let said = String::from_utf8(output.stderr).expect("text");
        match output.status.code() {
            Some(77) => eprintln!("skipped: {name}"),
            code => assert_eq!(code, Some(1), "{name}: {said}"),
        }
    }
}

#[test]
fn the_commands_of_the_page_on_ci_verify_a_golden() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("src/docs/ci.md")).expect("the page");
    let runs = page
        .lines()
        .filter_map(|line| line.trim().strip_prefix("run: "));
    let golden = root.join("golden/llama-tiny.golden").display().to_string();
    let mut count = 0;
    for command in runs {
        let of_program = command
            .split_once(" -- ")
            .or(command.split_once("&& bitstep "));
        let (_, arguments) = of_program.expect("a command of the program");
        let word = |word| match word {
            "golden/*.golden" | "training/*.golden" => golden.as_str(),
            word => word,
        };
        let arguments: Vec<&str> = arguments.split(' ').map(word).collect();
        let ran = super::bitstep(&arguments);
        assert_eq!(ran.code, 0, "{command}: {}", ran.err);
        assert!(ran.out.contains("identical"), "{command}: {}", ran.out);
        count += 1;
    }
    assert_eq!(count, 2);
}
