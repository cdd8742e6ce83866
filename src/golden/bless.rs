//! Blesses a golden: writes down a recipe's bits, with the reason why they are right.
//!
//! The recipe runs twice, in two ways that must not matter (other vector instructions, another number
//! of threads), and bits that depend on the way are never written. A golden that holds already keeps
//! its reason.

use std::ffi::OsStr;
use std::path::Path;

use super::compare::{FirstDifference, Verdict, compare};
use super::file::GoldenFile;
use super::record::record;
use super::verify::verify;
use crate::backend::Backend;
use crate::engine::run::Run;
use crate::error::{Error, GoldenError, RunError};
use crate::io::Recipe;

/// What blessing did.
#[derive(Clone, Debug, PartialEq)]
pub enum Blessed {
    /// There was no golden; it has been written.
    Written(GoldenFile),
    /// The golden there has the same bits; nothing was changed.
    Unchanged(GoldenFile),
    /// The golden there differed and has been replaced.
    Replaced {
        golden: GoldenFile,
        difference: Box<FirstDifference>,
        /// The comparison of steps, tensors and traces alone, without the header.
        bits: Verdict,
    },
    /// The two runs differ; nothing was changed.
    NotRepeatable(Box<FirstDifference>),
}

/// Whether a golden may be blessed: `ci` is the environment variable CI, where it is set.
///
/// # Errors
/// [`GoldenError::RefusedInCi`], or [`GoldenError::NoReason`] for a reason without a word.
pub fn check_allowed(ci: Option<&OsStr>, because: &str) -> Result<(), GoldenError> {
    if ci.is_some_and(|value| !value.is_empty()) {
        return Err(GoldenError::RefusedInCi);
    }
    match because.trim().is_empty() {
        true => Err(GoldenError::NoReason),
        false => Ok(()),
    }
}

/// Refuses steps whose loss or norm is not finite: they were dropped whole.
fn refuse_non_finite(golden: &GoldenFile) -> Result<(), RunError> {
    for line in &golden.steps {
        for (what, bits) in [("loss", line.loss), ("gradient norm", line.grad_norm)] {
            let found = f32::from_bits(bits);
            if !found.is_finite() {
                let step = line.step;
                return Err(RunError::NonFiniteGolden { step, what, found });
            }
        }
    }
    Ok(())
}

/// Runs the golden steps of `recipe` on both backends and writes the golden at `path` when they agree.
///
/// # Errors
/// A golden at `path` that cannot be read; whatever stops a run or the writing.
pub fn bless<B: Backend>(
    recipe: &Recipe,
    path: &Path,
    because: &str,
    backends: (B, B),
) -> Result<Blessed, Error> {
    let old = match path.exists() {
        true => Some(GoldenFile::read(path)?),
        false => None,
    };
    let recipe = recipe.to_trace();
    let mut run = Run::open(recipe.clone(), backends.0)?;
    let mut golden = record(&mut run, None, None)?.golden;
    drop(run);
    if golden.steps.is_empty() {
        let path = path.display().to_string();
        return Err(GoldenError::Empty { path }.into());
    }
    refuse_non_finite(&golden)?;
    if let Verdict::Differs(difference) = verify(&golden, &recipe, backends.1, None)?.verdict {
        return Ok(Blessed::NotRepeatable(difference));
    }
    // The reason is one line of the text form.
    golden.because = because.split_whitespace().collect::<Vec<_>>().join(" ");
    let Some(old) = old else {
        golden.write(path)?;
        return Ok(Blessed::Written(golden));
    };
    match compare(&old, &golden) {
        Verdict::Identical => Ok(Blessed::Unchanged(old)),
        Verdict::Differs(difference) => {
            golden.write(path)?;
            let bits = compare_bits(&old, &golden);
            Ok(Blessed::Replaced {
                golden,
                difference,
                bits,
            })
        }
    }
}

/// Compares two goldens without their headers.
pub fn compare_bits(old: &GoldenFile, new: &GoldenFile) -> Verdict {
    let mut headed = GoldenFile::empty(&new.domain, new.recipe.clone(), new.manifest.clone());
    headed.contract = new.contract;
    headed.steps.clone_from(&old.steps);
    headed.tensors.clone_from(&old.tensors);
    headed.ops.clone_from(&old.ops);
    compare(&headed, new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blessing_needs_a_person_and_a_reason() {
        let because = "first golden";
        assert!(check_allowed(None, because).is_ok());
        assert!(check_allowed(Some(OsStr::new("")), because).is_ok());
        let ci = check_allowed(Some(OsStr::new("true")), because);
        assert!(matches!(ci, Err(GoldenError::RefusedInCi)));
        let silent = check_allowed(None, " \n");
        assert!(matches!(silent, Err(GoldenError::NoReason)));
    }

    #[test]
    fn bits_are_compared_whatever_the_header_says() {
        let hash = blake3::hash(b"h");
        let mut old = GoldenFile::empty("f32", hash.to_string(), hash.to_string());
        let line = super::super::file::StepLine {
            step: 0,
            loss: 1,
            grad_norm: 2,
            root: hash,
        };
        old.steps.push(line);
        let mut new = old.clone();
        new.recipe = blake3::hash(b"other").to_string();
        assert!(matches!(compare(&old, &new), Verdict::Differs(_)));
        assert_eq!(compare_bits(&old, &new), Verdict::Identical);
        new.steps[0].loss = 3;
        assert!(matches!(compare_bits(&old, &new), Verdict::Differs(d) if d.what == "loss"));
    }
}
