//! For each rule of the house a small text that breaks it, and one that does not.

use super::source::{Fault, File};
use super::{layers, named_tests, rules};

const NONE: [usize; 0] = [];

fn file(path: &str, text: &str) -> File {
    File::new(path, text)
}

/// The lines on which `rule` finds faults.
fn lines(rule: impl Fn(&File) -> Vec<Fault>, path: &str, text: &str) -> Vec<usize> {
    rule(&file(path, text)).iter().map(|f| f.line).collect()
}

#[test]
fn an_import_from_above_trips() {
    let check = |path, text| lines(layers::check, path, text);
    assert_eq!(
        check("src/error/data.rs", "\nuse crate::shape::Shape;"),
        NONE
    );
    assert_eq!(check("src/error/data.rs", "\nuse crate::op::Op;"), [2]);
    let grouped = "use crate::{\n    error::Error,\n    engine::{Hyper, Trainer},\n};";
    assert_eq!(check("src/io/recipe.rs", grouped), [3]);
    assert_eq!(
        check("src/model/decoder.rs", "use crate::cpu::CpuBackend;"),
        [1]
    );
    assert_eq!(
        check("src/model/decoder.rs", "use crate::backend::Backend;"),
        [1]
    );
    assert_eq!(check("src/cuda/arena.rs", "use crate::cpu::arena;"), [1]);
    assert_eq!(check("src/cpu/arena.rs", "use crate::cuda::arena;"), [1]);
    assert_eq!(
        check("src/cpu/arena.rs", "use super::super::engine::Hyper;"),
        [1]
    );
    assert_eq!(check("src/grad.rs", "use super::engine::Hyper;"), [1]);
    assert_eq!(
        check("src/cpu/arena.rs", "// use crate::engine::Hyper;"),
        NONE
    );
    assert_eq!(
        check("src/attic/old.rs", ""),
        [1],
        "a module without a layer"
    );
}

#[test]
fn long_files_and_functions_trip() {
    let long = "// a line\n".repeat(501);
    assert_eq!(lines(rules::file_length, "src/a.rs", &long), [1]);
    assert_eq!(lines(rules::file_length, "src/a_tests.rs", &long), NONE);
    let body = |n: usize| format!("\nfn f() {{\n{}}}\n", "    g();\n".repeat(n));
    assert_eq!(lines(rules::function_size, "src/a.rs", &body(69)), [2]);
    assert_eq!(lines(rules::function_size, "src/a.rs", &body(68)), NONE);
}

#[test]
fn a_sixth_parameter_trips_and_self_does_not_count() {
    let six = "fn f<A: Fn(u8) -> u8>(a: A, b: [u8; 2], c: (u8, u8), d: V<A, B>, e: u8, f: u8) {}";
    assert_eq!(lines(rules::function_size, "src/a.rs", six), [1]);
    let five = "fn f(&mut self, a: A, b: [u8; 2], c: (u8, u8), d: V<A, B>, e: u8) {}";
    assert_eq!(lines(rules::function_size, "src/a.rs", five), NONE);
}

#[test]
fn a_public_flag_trips() {
    let check = |text| lines(rules::flag_parameters, "src/a.rs", text);
    assert_eq!(check("pub fn f(a: u8, fast: bool) {}"), [1]);
    assert_eq!(check("pub(crate) fn f(fast: bool);"), [1]);
    assert_eq!(check("fn f(fast: bool) {}"), NONE);
    assert_eq!(check("pub fn f(flags: &[bool]) -> bool {}"), NONE);
}

#[test]
fn unsafe_in_the_wrong_place_or_without_proof_trips() {
    let proven = "// SAFETY: the caller has checked the length.\nunsafe { f() }";
    let bare = "let x = 1;\nunsafe { f() }";
    let check = |path, text| lines(rules::unsafe_code, path, text);
    assert_eq!(check("src/cpu/simd.rs", proven), NONE);
    assert_eq!(check("src/cpu/simd.rs", bare), [2]);
    let later = "// SAFETY: inside.\nlet x =\n    unsafe { f() };\nlet y =\n    unsafe { f() };";
    assert_eq!(check("src/cpu/simd.rs", later), [5]);
    assert_eq!(check("src/cpu/arena.rs", proven), [2]);
    assert_eq!(
        check(
            "src/cpu/simd.rs",
            "/// # Safety\n/// Needs AVX2.\nunsafe fn f() {}"
        ),
        NONE
    );
    assert_eq!(check("src/cpu/simd.rs", "/// Fast.\nunsafe fn f() {}"), [2]);
    assert_eq!(
        check("src/cpu/arena.rs", "#![deny(unsafe_code)] // unsafe"),
        NONE
    );
}

#[test]
fn the_clock_and_the_environment_trip() {
    let check = |path, text| lines(rules::clock_and_environment, path, text);
    assert_eq!(check("src/engine/a.rs", "use std::time::Instant;"), [1]);
    assert_eq!(check("src/engine/a.rs", "let x = std::env::args();"), [1]);
    assert_eq!(check("src/cli/a.rs", "use std::time::Instant;"), NONE);
    let in_tests = "#[cfg(test)]\nmod tests {\n    use std::env;\n}";
    assert_eq!(check("src/engine/a.rs", in_tests), NONE);
}

#[test]
fn names_that_say_nothing_trip() {
    let check = |path, text| lines(rules::empty_names, path, text);
    for bad in [
        "fn read_helper() {}",
        "struct ArenaManager;",
        "let inner = 1;",
        "fn f_v2() {}",
    ] {
        assert_eq!(check("src/a.rs", bad), [1], "{bad}");
    }
    assert_eq!(check("src/a.rs", "fn f(which: usize) {}"), [1]);
    assert_eq!(check("src/a.rs", "fn new_full() {}"), [1]);
    assert_eq!(check("src/utils.rs", ""), [1]);
    assert_eq!(
        check("src/a.rs", "let x = cell.into_inner(); // the inner loop"),
        NONE
    );
}

#[test]
fn a_map_without_order_trips() {
    let check = |text| lines(rules::unordered_maps, "src/a.rs", text);
    assert_eq!(check("use std::collections::HashMap;"), [1]);
    assert_eq!(check("use std::collections::BTreeMap;"), NONE);
}

#[test]
fn leftovers_trip() {
    let check = |text: &str| lines(rules::leftovers, "README.md", text);
    assert_eq!(check(concat!("a\nTO", "DO: later")), [2]);
    assert_eq!(check(concat!("see /wo", "rk/main/x")), [1]);
    assert_eq!(check("cd path/to/work/x"), NONE);
}

#[test]
fn an_op_without_a_file_trips() {
    let all = ["src/op/mod.rs", "src/op/clip.rs", "src/cpu/clip.rs"];
    assert!(rules::op_files(&all).is_empty());
    let missing = ["src/op/mod.rs", "src/op/clip.rs", "src/cpu/bias.rs"];
    assert_eq!(rules::op_files(&missing).len(), 1);
    let half = ["src/op/clip.rs", "src/cpu/clip.rs", "src/cuda/graph.rs"];
    assert_eq!(
        rules::op_files(&half)[0].what,
        "the op has no src/cuda/clip.rs"
    );
}

#[test]
fn a_test_that_does_not_exist_trips() {
    let source = "#[cfg(test)]\nmod tests {\n    #[test]\n    fn it_holds() {}\n}";
    let suite = "#[test]\nfn it_steps() {}";
    let files = [
        file("src/cpu/clip.rs", source),
        file("tests/engine/steps.rs", suite),
    ];
    let tests = named_tests::tests_of(&files);
    let page = "`cpu::clip::tests::it_holds` `engine::steps::it_steps` `Engine::new`";
    assert!(named_tests::missing_tests(&file("a.md", page), &tests).is_empty());
    let page = "one\n`cpu::clip::it_holds`";
    assert_eq!(
        named_tests::missing_tests(&file("a.md", page), &tests)[0].line,
        2
    );
}

#[test]
fn a_key_that_is_not_described_trips() {
    let table = file("keys.rs", "key(\"seed\", X), key(\n    \"data.batch\", Y)");
    let keys = named_tests::recipe_keys(&table);
    assert_eq!(keys, ["seed", "data.batch"]);
    let page = file("recipes.md", "| `seed` | integer |");
    assert_eq!(named_tests::missing_keys(&page, &keys).len(), 1);
}

#[test]
fn comments_and_literals_are_no_code() {
    let text = "let a = \"fn x\"; // fn y\nlet b = '\\''; /* fn z */ fn w<'a>() {}";
    let code = file("a.rs", text).code;
    assert_eq!(code.len(), text.len());
    assert_eq!(code.matches("fn").count(), 1);
    let raw = "let a = r\"fn x\"; let b = r#\"fn \" y\"#; let c = 'ß'; fn z() {}";
    assert_eq!(file("a.rs", raw).code.matches("fn").count(), 1);
}
