//! The options with which every command takes a recipe.

use std::path::PathBuf;

use clap::Args;

use crate::error::ConfigError;
use crate::io::Recipe;

/// A recipe and what is changed in it.
#[derive(Args, Clone, Debug)]
pub struct RecipeArguments {
    /// The recipe, a TOML file
    #[arg(value_name = "RECIPE")]
    pub recipe: PathBuf,
    /// Changes a key of the recipe, such as optimizer.lr=1e-3; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

impl RecipeArguments {
    /// Reads the recipe and applies the changes, all at once, and then `more`.
    ///
    /// # Errors
    /// A recipe that cannot be read or does not fit.
    pub fn open(&self, more: Option<String>) -> Result<Recipe, ConfigError> {
        let mut recipe = Recipe::from_path(&self.recipe)?;
        let changes = self.set.iter().chain(&more).map(String::as_str);
        recipe.set_all(changes)?;
        Ok(recipe)
    }
}
