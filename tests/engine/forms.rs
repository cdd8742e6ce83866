//! One golden for every form of a step: in passes, with activations computed anew, and both.

use std::path::Path;

use bitstep::engine::session::Session;
use bitstep::error::StepError;
use bitstep::golden::verify::verify;
use bitstep::golden::{GoldenFile, Verdict};
use bitstep::io::Recipe;

use super::common::cpu;

fn golden(name: &str) -> (GoldenFile, Recipe) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    let recipe = Recipe::from_path(&folder.join(format!("{name}.toml"))).expect("the recipe");
    let golden = GoldenFile::read(&folder.join(format!("{name}.golden"))).expect("the golden");
    (golden, recipe)
}

#[test]
fn a_golden_holds_for_every_form() {
    let forms: [(&str, &[&str]); 4] = [
        ("qwen3-tiny", &["data.micro_batch=2"]),
        ("qwen3-tiny", &["data.micro_batch=2", "memory.recompute=2"]),
        ("mamba-tiny", &["memory.recompute=1"]),
        // A frozen base is recomputed unless its recipe says otherwise.
        ("qlora-tiny", &[]),
    ];
    for (name, form) in forms {
        let (golden, mut recipe) = golden(name);
        recipe.set_all(form.iter().copied()).expect("fits");
        let verified = verify(&golden, &recipe, cpu(2), None).expect("runs");
        assert_eq!(verified.verdict, Verdict::Identical, "{name} {form:?}");
        assert!(verified.fresh.ops.is_empty(), "traces are of other calls");
        assert_eq!(verified.fresh.recipe, golden.recipe);
        assert_eq!(verified.fresh.manifest, golden.manifest);
    }
}

#[test]
fn a_flipped_bit_is_found_in_every_form() {
    let (mut golden, mut recipe) = golden("qwen3-tiny");
    golden.steps.truncate(3);
    recipe
        .set_all(["golden.steps=3", "data.micro_batch=2"])
        .expect("fits");
    golden.recipe = recipe.defining().hash().expect("a hash");
    let mut flip = |step: u64, session: &mut Session<_>| -> Result<(), StepError> {
        if step == 2 {
            let mut weights = session.read_param("model.norm.weight")?;
            weights[5] = f32::from_bits(weights[5].to_bits() ^ 1);
            session.write_param("model.norm.weight", &weights)?;
        }
        Ok(())
    };
    let verified = verify(&golden, &recipe, cpu(1), Some(&mut flip)).expect("runs");
    let Verdict::Differs(difference) = verified.verdict else {
        panic!("a flipped bit must show");
    };
    assert_eq!(difference.step, Some(2));
}
