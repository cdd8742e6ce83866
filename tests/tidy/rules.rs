//! The other rules of the house, each a function from a file to its faults.

use super::functions::functions;
use super::source::{Fault, File, words};

/// Lines of a file of source.
const FILE_LINES: usize = 500;
/// Lines of a function.
const FUNCTION_LINES: usize = 70;
/// Parameters of a function, `self` apart.
const PARAMETERS: usize = 5;

/// Files that may be longer, each with its reason. None is at present.
const LONGER_FILES: [(&str, &str); 0] = [];

/// Where `unsafe` may stand: vector instructions, and the calls of a driver.
const UNSAFE_FILES: [&str; 9] = [
    "src/cpu/simd.rs",
    "src/cuda/device.rs",
    "src/cuda/module.rs",
    "src/cuda/arena.rs",
    "src/cuda/launch.rs",
    "src/cuda/graph.rs",
    "src/cuda/graph_edges.rs",
    "src/cuda/graph_tests.rs",
    "src/cuda/gemm.rs",
];

/// Files outside the command line that may read the clock or the environment, each with its reason.
const READS_THE_MACHINE: [(&str, &str); 1] = [(
    "src/cpu/peak.rs",
    "the rate of one core can only be measured with a clock, and no training code calls it",
)];

/// Files longer than a reader can hold; test files are lists of cases and may be.
pub fn file_length(file: &File) -> Vec<Fault> {
    let lines = file.text.lines().count();
    let excluded = file.is_test() || LONGER_FILES.iter().any(|(path, _)| *path == file.path);
    match file.is_rust() && lines > FILE_LINES && !excluded {
        true => vec![file.fault(0, format!("{lines} lines, at most {FILE_LINES}"))],
        false => Vec::new(),
    }
}

/// Functions that are too long or take too much.
pub fn function_size(file: &File) -> Vec<Fault> {
    let mut faults = Vec::new();
    for f in functions(file).iter().filter(|_| file.is_rust()) {
        if f.lines > FUNCTION_LINES {
            let what = format!("fn {}: {} lines, at most {FUNCTION_LINES}", f.name, f.lines);
            faults.push(file.fault(f.offset, what));
        }
        let count = f.parameters.len();
        if count > PARAMETERS {
            let what = format!("fn {}: {count} parameters, at most {PARAMETERS}", f.name);
            faults.push(file.fault(f.offset, what));
        }
    }
    faults
}

/// Flags in public signatures: a reader of the call cannot tell what `true` means.
pub fn flag_parameters(file: &File) -> Vec<Fault> {
    if !file.path.starts_with("src/") || !file.is_rust() || file.is_test() {
        return Vec::new();
    }
    let mut faults = Vec::new();
    for f in functions(file).iter().filter(|f| f.public) {
        for parameter in &f.parameters {
            let (name, kind) = parameter.split_once(':').unwrap_or((parameter, ""));
            if kind.trim() == "bool" {
                let what = format!("pub fn {}: `{}` is a bool", f.name, name.trim());
                faults.push(file.fault(f.offset, what));
            }
        }
    }
    faults
}

/// `unsafe` where it may not stand, or without the proof that it may.
pub fn unsafe_code(file: &File) -> Vec<Fault> {
    if !file.is_rust() {
        return Vec::new();
    }
    let allowed = UNSAFE_FILES.contains(&file.path.as_str());
    let mut faults = Vec::new();
    for (offset, _) in file.words().filter(|(_, word)| *word == "unsafe") {
        if !allowed {
            faults.push(file.fault(offset, "`unsafe` stands outside the files that may have it"));
        } else if !has_proof(&file.text[..offset], &file.code[offset..]) {
            faults.push(file.fault(offset, "`unsafe` without a SAFETY comment before it"));
        }
    }
    faults
}

/// Whether the comment right above has the proof. A function passes the duty on, in its documentation.
fn has_proof(before: &str, from: &str) -> bool {
    let mark = match words(from).nth(1) {
        Some((_, "fn")) => "# Safety",
        _ => "SAFETY:",
    };
    let mut lines = before.lines().rev();
    let own = lines.next().unwrap_or("");
    // The comment stands before the whole statement, of which `unsafe` may be a later line.
    let statement = |line: &&str| {
        let line = line.trim();
        !line.starts_with("//") && !line.ends_with([';', '{', '}', ',']) && !line.is_empty()
    };
    let above = lines.skip_while(statement).take_while(|line| {
        let line = line.trim_start();
        line.starts_with("//") || line.starts_with("#[")
    });
    own.contains(mark) || above.into_iter().any(|line| line.contains(mark))
}

/// The clock and the environment, which only the command line may read.
pub fn clock_and_environment(file: &File) -> Vec<Fault> {
    let path = file.path.as_str();
    let engine = path.starts_with("src/") && !path.starts_with("src/cli/");
    let excluded = READS_THE_MACHINE.iter().any(|(p, _)| *p == path);
    if !engine || !file.is_rust() || file.is_test() || excluded {
        return Vec::new();
    }
    let forbidden = [
        "std::env",
        "env::var",
        "Instant::",
        "time::Instant",
        "SystemTime",
    ];
    let code = &file.code[..file.tests_start()];
    let found = forbidden.iter().flat_map(|name| code.match_indices(name));
    found
        .map(|(offset, name)| file.fault(offset, format!("`{name}` outside the command line")))
        .collect()
}

/// Names that say nothing about what they name.
pub fn empty_names(file: &File) -> Vec<Fault> {
    if !file.is_rust() || file.path.starts_with("tests/tidy/") {
        return Vec::new();
    }
    let mut faults = Vec::new();
    for (offset, word) in file.words() {
        if says_nothing(word) {
            faults.push(file.fault(offset, format!("the name `{word}` says nothing")));
        }
    }
    for (offset, _) in file.code.match_indices("which: usize") {
        faults.push(file.fault(offset, "`which: usize` where an enum belongs"));
    }
    let stem = file.path.rsplit('/').next().unwrap_or("");
    if says_nothing(stem.strip_suffix(".rs").unwrap_or(stem)) {
        faults.push(file.fault(0, "the file's name says nothing"));
    }
    faults
}

fn says_nothing(name: &str) -> bool {
    const EMPTY: [&str; 7] = [
        "util", "utils", "helper", "helpers", "manager", "inner", "v2",
    ];
    let name = match name {
        // The standard library's own names.
        "into_inner" | "IntoInnerError" => return false,
        // The width of Mamba's channels, as its paper and every implementation call it.
        "d_inner" => return false,
        "new_full" => return true,
        // The CUDA driver's own names carry the version of their interface.
        driver if driver.starts_with("cu") && driver.ends_with("_v2") => return false,
        other => other,
    };
    let mut parts = vec![String::new()];
    for c in name.chars() {
        if c == '_' || c.is_uppercase() {
            parts.push(String::new());
        }
        if c != '_'
            && let Some(part) = parts.last_mut()
        {
            part.extend(c.to_lowercase());
        }
    }
    parts.iter().any(|part| EMPTY.contains(&part.as_str()))
}

/// Work left undone, and paths of one machine.
pub fn leftovers(file: &File) -> Vec<Fault> {
    let marks = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("XX", "X"),
    ];
    let mut faults = Vec::new();
    for mark in marks {
        for (offset, _) in file.text.match_indices(mark) {
            faults.push(file.fault(offset, format!("`{mark}` is left")));
        }
    }
    let paths = [
        concat!("/wo", "rk/"),
        concat!("/ro", "ot/"),
        concat!("/ho", "me/"),
    ];
    for path in paths {
        for (offset, _) in file.text.match_indices(path) {
            let before = file.text[..offset].chars().next_back().unwrap_or(' ');
            if !(before.is_alphanumeric() || ".-_~}".contains(before)) {
                faults.push(file.fault(offset, format!("`{path}` is a path of one machine")));
            }
        }
    }
    faults
}

/// Maps whose order differs from run to run; tests may use them for sets that nobody walks.
pub fn unordered_maps(file: &File) -> Vec<Fault> {
    if !file.path.starts_with("src/") || !file.is_rust() || file.is_test() {
        return Vec::new();
    }
    let code = words(&file.code[..file.tests_start()]);
    let found = code.filter(|(_, word)| ["HashMap", "HashSet"].contains(word));
    found
        .map(|(offset, word)| file.fault(offset, format!("`{word}` has no order")))
        .collect()
}

/// Ops that lack a file of the same stem on a backend. `step_values` is data that ops share.
pub fn op_files(paths: &[&str]) -> Vec<Fault> {
    let mut faults = Vec::new();
    let backends: Vec<&str> = ["src/cpu/", "src/cuda/"]
        .into_iter()
        .filter(|folder| paths.iter().any(|p| p.starts_with(folder)))
        .collect();
    for path in paths {
        let Some(name) = path.strip_prefix("src/op/") else {
            continue;
        };
        if ["mod.rs", "step_values.rs"].contains(&name) {
            continue;
        }
        for backend in &backends {
            let wanted = format!("{backend}{name}");
            if !paths.contains(&wanted.as_str()) {
                faults.push(Fault {
                    path: (*path).to_owned(),
                    line: 1,
                    what: format!("the op has no {wanted}"),
                });
            }
        }
    }
    faults
}
