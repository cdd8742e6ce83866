//! The house is tidy: layers, sizes, names, `unsafe`, and what documents promise.
//!
//! The rules run over the whole source tree; beside each stands a small bad text that trips it.

mod functions;
mod layers;
mod named_tests;
mod rules;
mod source;
mod trips;

use source::{Fault, File, tree};

/// Fails with every fault, a line each.
fn report(faults: &[Fault]) {
    let lines: Vec<String> = faults.iter().map(Fault::to_string).collect();
    assert!(faults.is_empty(), "\n{}", lines.join("\n"));
}

fn everywhere(rule: impl Fn(&File) -> Vec<Fault>) {
    report(&tree().iter().flat_map(rule).collect::<Vec<_>>());
}

fn page<'a>(files: &'a [File], path: &str) -> &'a File {
    let found = files.iter().find(|f| f.path == path);
    found.unwrap_or_else(|| panic!("{path} is missing"))
}

#[test]
fn modules_import_only_layers_below_them() {
    everywhere(layers::check);
}

#[test]
fn files_are_short() {
    everywhere(rules::file_length);
}

#[test]
fn functions_are_short_and_take_little() {
    everywhere(rules::function_size);
}

#[test]
fn public_functions_take_no_flags() {
    everywhere(rules::flag_parameters);
}

#[test]
fn unsafe_stands_where_it_may_with_its_proof() {
    everywhere(rules::unsafe_code);
}

#[test]
fn only_the_command_line_reads_the_clock_and_the_environment() {
    everywhere(rules::clock_and_environment);
}

#[test]
fn names_say_something() {
    everywhere(rules::empty_names);
}

#[test]
fn nothing_is_left_undone_or_tied_to_a_machine() {
    everywhere(rules::leftovers);
}

#[test]
fn maps_have_an_order() {
    everywhere(rules::unordered_maps);
}

#[test]
fn every_op_has_its_files() {
    let files = tree();
    let paths: Vec<&str> = files.iter().map(|f| f.path.as_str()).collect();
    report(&rules::op_files(&paths));
}

#[test]
fn every_test_that_a_page_names_exists() {
    let files = tree();
    let tests = named_tests::tests_of(&files);
    for path in ["src/docs/pitfalls.md", "src/docs/architecture.md"] {
        let page = page(&files, path);
        assert!(
            named_tests::named_in(page).len() >= 10,
            "{path} names tests"
        );
        report(&named_tests::missing_tests(page, &tests));
    }
}

#[test]
fn every_key_of_a_recipe_is_described() {
    let files = tree();
    let keys = named_tests::recipe_keys(page(&files, "src/io/recipe_keys.rs"));
    assert!(keys.len() >= 40, "the table of keys is found");
    let page = page(&files, "src/docs/recipes.md");
    report(&named_tests::missing_keys(page, &keys));
}
