//! Verifies a golden: runs its recipe again, compares, and on a difference looks for the place.

use std::path::{Path, PathBuf};

use super::compare::{Verdict, compare};
use super::file::GoldenFile;
use super::locate::locate;
use super::record::{Disturb, record};
use crate::backend::Backend;
use crate::engine::run::Run;
use crate::error::{Error, GoldenError};
use crate::io::Recipe;

/// A verified golden: the verdict, and what the run gave.
pub struct Verified {
    pub verdict: Verdict,
    pub fresh: GoldenFile,
}

/// Runs `recipe` on `backend` and compares with `golden`.
///
/// # Errors
/// Whatever stops the run. A difference is a verdict, not an error.
pub fn verify<B: Backend>(
    golden: &GoldenFile,
    recipe: &Recipe,
    backend: B,
    disturb: Option<Disturb<B>>,
) -> Result<Verified, Error> {
    let mut run = Run::open(recipe.clone(), backend)?;
    let mut recorded = record(&mut run, Some(golden), disturb)?;
    recorded.golden.because.clone_from(&golden.because);
    let form = run.trainer.session().plan().config.form;
    let compared = match form.is_defining() {
        true => compare(golden, &recorded.golden),
        // A golden of the defining form has traces of calls that this form does not make.
        false => {
            let mut untraced = golden.clone();
            untraced.ops.clear();
            compare(&untraced, &recorded.golden)
        }
    };
    let verdict = match (compared, recorded.departure) {
        (Verdict::Differs(mut difference), Some(departure)) if form.is_defining() => {
            locate(&mut difference, golden, (&mut run, &departure))?;
            Verdict::Differs(difference)
        }
        (verdict, _) => verdict,
    };
    Ok(Verified {
        verdict,
        fresh: recorded.golden,
    })
}

/// The recipe beside a golden: the same name with the ending `.toml`.
///
/// # Errors
/// [`GoldenError::NoRecipe`] when there is none.
pub fn recipe_beside(golden: &Path) -> Result<PathBuf, GoldenError> {
    let recipe = golden.with_extension("toml");
    match recipe.is_file() {
        true => Ok(recipe),
        false => Err(GoldenError::NoRecipe {
            golden: golden.display().to_string(),
            recipe: recipe.display().to_string(),
        }),
    }
}
