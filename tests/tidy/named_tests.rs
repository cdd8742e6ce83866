//! Tests that a document names must exist, and a document that lists keys must list them all.

use std::collections::BTreeSet;

use super::source::{Fault, File};

/// Every test of the tree by the name under which `cargo test` prints it.
pub fn tests_of(files: &[File]) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for file in files.iter().filter(|f| f.is_rust()) {
        let module = module_of(&file.path);
        for (offset, _) in file.code.match_indices("#[test]") {
            let after = &file.code[offset..];
            let Some(name) = after.find("fn ").map(|i| &after[i + 3..]) else {
                continue;
            };
            let end = name.find(|c: char| !(c.is_alphanumeric() || c == '_'));
            let name = &name[..end.unwrap_or(name.len())];
            let inside = file.path.starts_with("src/") && offset >= file.tests_start();
            let tests = if inside { "tests::" } else { "" };
            names.insert(format!("{module}::{tests}{name}"));
        }
    }
    names
}

/// `src/cpu/clip.rs` is `cpu::clip`; `src/cpu/gemm_tests.rs` is the module `tests` of `cpu::gemm`;
/// `tests/engine/steps.rs` is `engine::steps`.
fn module_of(path: &str) -> String {
    let inside = path.strip_prefix("src/").or(path.strip_prefix("tests/"));
    let stem = inside.unwrap_or(path).trim_end_matches(".rs");
    let stem = stem.strip_suffix("/mod").unwrap_or(stem);
    let module = stem.replace('/', "::");
    match module.strip_suffix("_tests") {
        // The tests of recipes stand beside the checks they exercise.
        Some("io::recipe") => "io::recipe_check::tests".to_owned(),
        Some(parent) => format!("{parent}::tests"),
        None => module,
    }
}

/// The code spans of a page that are lower-case paths: in the pages checked, each is a test.
pub fn named_in(page: &File) -> Vec<(usize, &str)> {
    let mut names = Vec::new();
    let mut at = 0;
    while let Some(start) = page.text[at..].find('`').map(|i| at + i + 1) {
        let Some(end) = page.text[start..].find('`').map(|i| start + i) else {
            break;
        };
        let span = &page.text[start..end];
        let path = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:".contains(c);
        if span.contains("::") && span.chars().all(path) {
            names.push((start, span));
        }
        at = end + 1;
    }
    names
}

/// Names of tests that no test has.
pub fn missing_tests(page: &File, tests: &BTreeSet<String>) -> Vec<Fault> {
    named_in(page)
        .into_iter()
        .filter(|(_, name)| !tests.contains(*name))
        .map(|(offset, name)| page.fault(offset, format!("no test is named {name}")))
        .collect()
}

/// The keys of the recipe, from their table.
pub fn recipe_keys(table: &File) -> Vec<String> {
    let calls = table.text.split("key(").skip(1);
    let quoted = calls.filter_map(|call| call.trim_start().strip_prefix('"')?.split('"').next());
    quoted.map(str::to_owned).collect()
}

/// Keys that the page of recipes does not have, as `` `section.key` ``.
pub fn missing_keys(page: &File, keys: &[String]) -> Vec<Fault> {
    let absent = keys.iter().filter(|key| {
        let span = format!("`{key}`");
        !page.text.contains(&span)
    });
    absent
        .map(|key| page.fault(0, format!("the key {key} is not described")))
        .collect()
}
