//! `bitstep eval`.

use std::path::PathBuf;

use clap::Args;

use super::device::DeviceArguments;
use super::recipe_options::RecipeArguments;
use super::{Outcome, output};
use crate::backend::Backend;
use crate::engine::run::Run;
use crate::error::{ConfigError, Error, ExitCode, RunError};
use crate::io::recipe::{DataSource, FolderSection, ModelSection, Recipe};
use crate::report::sums;

/// Answers shown of the sums held out.
const ANSWERS_SHOWN: usize = 3;

/// Arguments of `bitstep eval`.
#[derive(Args, Debug)]
pub struct Eval {
    #[command(flatten)]
    recipe: RecipeArguments,
    /// A model folder, in place of the recipe's model
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArguments,
}

impl Eval {
    /// Evaluates the recipe's model, or the folder's, on the data set aside.
    pub fn run(self) -> Outcome {
        let mut recipe = self.recipe.open(None)?;
        if let Some(folder) = &self.model {
            replace_model(&mut recipe, folder)?;
        }
        if !recipe.sets_data_aside() {
            let recipe = self.recipe.recipe.display().to_string();
            return Err(RunError::NoValidation { recipe }.into());
        }
        let fresh = recipe.model_folder().is_none();
        let mut run = Run::open(recipe, self.device.open()?)?;
        if fresh {
            output::note("the model is freshly drawn; --model DIR evaluates a trained one");
        }
        print_scores(&mut run)?;
        let root = run.trainer.session_mut().root()?;
        output::line(format_args!("root        {root} (over all parameters)"));
        Ok(ExitCode::Done)
    }
}

/// Puts a folder in the place of the recipe's model.
fn replace_model(recipe: &mut Recipe, folder: &std::path::Path) -> Result<(), ConfigError> {
    let path = std::path::absolute(folder).unwrap_or_else(|_| folder.to_path_buf());
    recipe.model = ModelSection::Folder(FolderSection {
        path: path.display().to_string(),
    });
    recipe.validate()
}

/// Prints loss, perplexity and accuracy on the data set aside, and the score on the sums; nothing
/// where a recipe sets nothing aside.
///
/// # Errors
/// Data that cannot be read; a device fault.
pub fn print_scores<B: Backend>(run: &mut Run<B>) -> Result<(), Error> {
    if !run.recipe.sets_data_aside() {
        return Ok(());
    }
    let found = run.validate()?;
    if !found.loss().is_finite() {
        return Err(RunError::NonFiniteScore {
            found: found.loss(),
        }
        .into());
    }
    output::line(format_args!(
        "validation  loss {:.6}, perplexity {:.4}, {} of {} tokens right ({:.1} %)",
        found.loss(),
        found.perplexity(),
        found.hits,
        found.scored,
        100.0 * found.accuracy(),
    ));
    if run.recipe.data.source == DataSource::Sums {
        output::line(format_args!(
            "held-out sums: {}",
            sums::score(&mut run.trainer)?
        ));
        for answer in sums::answers(&mut run.trainer, ANSWERS_SHOWN)? {
            let verdict = match answer.found == answer.expected {
                true => "right".to_owned(),
                false => format!("wrong: it is {}", answer.expected),
            };
            output::line(format_args!(
                "  {}{}  {verdict}",
                answer.prompt, answer.found
            ));
        }
    }
    Ok(())
}
