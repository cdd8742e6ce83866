use proptest::prelude::*;

use super::*;
use crate::golden::record::record;
use crate::golden::verify::recipe_beside;

fn golden() -> GoldenFile {
    let digest = |text: &str| blake3::hash(text.as_bytes());
    let hash = digest("recipe").to_string();
    let mut golden = GoldenFile::empty("f32", hash.clone(), hash);
    golden.because = "they were looked at".into();
    for step in 0..3 {
        golden.steps.push(StepLine {
            step,
            loss: 4.5f32.to_bits() - step as u32,
            grad_norm: f32::MIN_POSITIVE.to_bits() + step as u32,
            root: digest("root"),
        });
    }
    for name in ["a.weight", "moment1.a.weight", "moment2.a.weight"] {
        let (name, digest) = (name.to_owned(), digest(name));
        golden.tensors.push(TensorLine { name, digest });
    }
    golden.ops.push(OpLine {
        step: 0,
        call: 7,
        stem: "embed".into(),
        tensor: "hidden".into(),
        digest: digest("op"),
    });
    golden
}

fn refused(text: &str) -> GoldenError {
    GoldenFile::parse(text, "x.golden").unwrap_err()
}

#[test]
fn a_golden_reads_back_as_it_was_written() {
    let golden = golden();
    let text = golden.to_text();
    let back = GoldenFile::parse(&text, "x.golden").unwrap();
    assert_eq!(back, golden);
    assert_eq!(back.to_text(), text);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.golden");
    golden.write(&path).unwrap();
    assert_eq!(GoldenFile::read(&path).unwrap(), golden);
}

#[test]
fn every_header_line_is_needed_in_its_place() {
    let text = golden().to_text();
    let header = [
        "schema", "contract", "domain", "recipe", "manifest", "because",
    ];
    for (index, key) in header.into_iter().enumerate() {
        let without: Vec<&str> = text.lines().filter(|l| !l.starts_with(key)).collect();
        match refused(&without.join("\n")) {
            GoldenError::Line { line, expected, .. } => {
                assert_eq!(line, index + 1);
                assert!(expected.contains(key), "{expected}");
            }
            other => panic!("{key}: {other:?}"),
        }
    }
    let cut: Vec<&str> = text.lines().take(3).collect();
    let cut = refused(&cut.join("\n"));
    assert!(matches!(cut, GoldenError::Truncated { expected, .. } if expected.contains("recipe")));
    assert!(matches!(refused(""), GoldenError::Truncated { .. }));
}

#[test]
fn a_line_that_does_not_parse_is_named_by_its_number() {
    let golden = golden();
    let text = golden.to_text();
    let first_step = text.lines().position(|l| l.starts_with("step")).unwrap();
    let changes: [fn(&str) -> String; 4] = [
        |line| line.replace("loss", "lost"),
        |line| line.replace("step 0", "step 1"),
        |line| line[..line.len() - 1].to_owned(),
        |_| String::new(),
    ];
    for change in changes {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines[first_step] = change(&lines[first_step]);
        match refused(&lines.join("\n")) {
            GoldenError::Line { line, .. } => assert_eq!(line, first_step + 1),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn another_schema_and_a_golden_without_steps_are_refused() {
    let text = golden().to_text().replacen("schema 1", "schema 2", 1);
    assert!(matches!(
        refused(&text),
        GoldenError::Schema {
            expected: SCHEMA,
            found: 2,
            ..
        }
    ));
    let mut empty = golden();
    empty.steps.clear();
    assert!(matches!(
        refused(&empty.to_text()),
        GoldenError::Empty { .. }
    ));
}

#[test]
fn files_that_are_not_there_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.golden");
    let missing = GoldenFile::read(&path);
    assert!(matches!(
        missing,
        Err(GoldenError::File { action: "read", .. })
    ));
    let beside = recipe_beside(&path);
    assert!(
        matches!(beside, Err(GoldenError::NoRecipe { recipe, .. }) if recipe.ends_with("x.toml"))
    );
    let nowhere = golden().write(&folder.path().join("none/x.golden"));
    assert!(matches!(
        nowhere,
        Err(GoldenError::File {
            action: "write",
            ..
        })
    ));
}

#[test]
fn more_traced_steps_than_eager_ones_are_refused() {
    use crate::cpu::{CpuBackend, context::CpuContext, simd::SimdPath};
    use crate::error::Error;
    let text = "name = 'x'\nsteps = 9\nwarmup_steps = 2\n\
        [model]\nfamily = 'llama'\nvocab_size = 64\nd_model = 8\nn_layers = 1\nn_heads = 1\nd_ff = 8\n\
        [data]\nbatch = 1\nseq_len = 16\n[optimizer]\nlr = 1e-3\n[golden]\ntrace_steps = 3\n";
    let recipe = crate::io::Recipe::from_toml(text, "x.toml").unwrap();
    let cpu = CpuBackend::new(CpuContext::new(SimdPath::detect(), 1).unwrap());
    let mut run = crate::engine::run::Run::open(recipe, cpu).unwrap();
    let refused = record(&mut run, None, None).map(|_| ());
    assert!(matches!(
        refused,
        Err(Error::Golden(GoldenError::TraceTooLong {
            expected: 2,
            found: 3
        }))
    ));
}

proptest! {
    #[test]
    fn mutated_text_never_panics(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<char>(), 0..3u8), 1..8)
    ) {
        let mut text: Vec<char> = golden().to_text().chars().collect();
        for (place, character, edit) in edits {
            if text.is_empty() {
                break;
            }
            let at = place.index(text.len());
            match edit {
                0 => text[at] = character,
                1 => drop(text.remove(at)),
                _ => text.truncate(at),
            }
        }
        let text: String = text.into_iter().collect();
        // What is still a golden reads back from its own text.
        if let Ok(golden) = GoldenFile::parse(&text, "x.golden") {
            prop_assert_eq!(GoldenFile::parse(&golden.to_text(), "x.golden").unwrap(), golden);
        }
    }

    #[test]
    fn any_text_never_panics(text in "\\PC{0,200}(\n\\PC{0,40}){0,8}") {
        let _ = GoldenFile::parse(&text, "x.golden");
    }
}
