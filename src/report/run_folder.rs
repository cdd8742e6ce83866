//! The folder a run leaves: `recipe.toml`, `manifest.txt`, `run.json`, `metrics.jsonl`, `outcome.json`,
//! `checkpoints/`, `tensorboard/` and `model/`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use super::events::EventsWriter;
use super::facts::{RunFacts, RunOutcome};
use super::metrics::MetricsWriter;
use super::recorder::Recorder;
use crate::backend::Backend;
use crate::engine::Session;
use crate::error::{CheckpointError, Error, RunError};
use crate::io::atomic::write_whole;
use crate::io::model_folder::{TOKENIZER, generation_file, tokenizer_files};
use crate::io::recipe::{DataSource, ModelSection, Recipe};
use crate::io::{ModelFolder, write_adapter_folder, write_model_folder};
use crate::model::lora::{LoraConfig, PEFT_PREFIX};

/// The recipe of a run.
pub const RECIPE: &str = "recipe.toml";
/// The adapters that a run has trained.
pub const ADAPTER: &str = "adapter";
/// A line a step.
pub const METRICS: &str = "metrics.jsonl";
/// What the run is.
pub const FACTS: &str = "run.json";
/// What the run came to.
pub const OUTCOME: &str = "outcome.json";
const EVENTS: &str = "tensorboard";

/// When a process of a run begins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Begins {
    /// Steps taken before.
    pub taken: u64,
    /// Seconds since the beginning of 1970.
    pub wall_s: f64,
}

/// The folder of one run.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
}

impl RunFolder {
    /// Checks that a folder can take a run: it is absent or empty. Nothing is created yet.
    ///
    /// # Errors
    /// [`RunError::FolderNotEmpty`], or [`RunError::Write`] for a path that is no folder.
    pub fn claim(path: &Path) -> Result<Self, RunError> {
        check_empty(path)?;
        Ok(RunFolder {
            path: path.to_path_buf(),
        })
    }

    /// The folder of a run that goes on, and its recipe.
    ///
    /// # Errors
    /// A recipe that cannot be read.
    pub fn reopen(path: &Path) -> Result<(Self, Recipe), Error> {
        let recipe = Recipe::from_path(&path.join(RECIPE))?;
        let path = path.to_path_buf();
        Ok((RunFolder { path }, recipe))
    }

    /// The folder's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the metrics of a run that goes on, and states anew what it runs on.
    ///
    /// # Errors
    /// A file that cannot be read or written.
    pub fn go_on(
        &self,
        recipe: &Recipe,
        facts: &RunFacts,
        begins: Begins,
    ) -> Result<Recorder, RunError> {
        let metrics = MetricsWriter::resume(&self.path.join(METRICS), begins.taken)?;
        self.write_json(FACTS, facts)?;
        let events = self.events(recipe, begins)?;
        Ok(Recorder::new(metrics, events))
    }

    /// Creates the folder, writes recipe, manifest and facts and opens the metrics.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn begin<B: Backend>(
        &self,
        recipe: &Recipe,
        session: &Session<B>,
        (facts, begins): (&RunFacts, Begins),
    ) -> Result<Recorder, Error> {
        let made = std::fs::create_dir_all(&self.path);
        made.map_err(|source| self.failed("", source))?;
        self.write(RECIPE, &recipe_text(recipe)?)?;
        self.write("manifest.txt", &manifest_text(session))?;
        self.write_json(FACTS, facts)?;
        let metrics = MetricsWriter::create(&self.path.join(METRICS))?;
        let events = self.events(recipe, begins)?;
        Ok(Recorder::new(metrics, events))
    }

    /// States what the run came to.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write_outcome(&self, outcome: &RunOutcome) -> Result<(), RunError> {
        self.write_json(OUTCOME, outcome)
    }

    fn events(&self, recipe: &Recipe, begins: Begins) -> Result<Option<EventsWriter>, RunError> {
        match recipe.metrics.tensorboard {
            Some(true) => {
                let folder = self.path.join(EVENTS);
                EventsWriter::create(&folder, begins.taken, begins.wall_s).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn write_json<T: serde::Serialize>(&self, name: &str, value: &T) -> Result<(), RunError> {
        let text = serde_json::to_string_pretty(value);
        let text = text.map_err(|e| self.failed(name, e.into()))?;
        self.write(name, &(text + "\n"))
    }

    /// Writes the session's adapters as `adapter/`, which PEFT loads; norms that are trained beside
    /// them stand in the same file.
    fn write_adapters<B: Backend>(
        &self,
        recipe: &Recipe,
        lora: &LoraConfig,
        session: &mut Session<B>,
    ) -> Result<(), Error> {
        let plan = session.plan().clone();
        let trained = plan.params.iter().filter(|p| p.state.is_some());
        let mut tensors = Vec::new();
        for param in trained {
            let name = match param.name.starts_with(PEFT_PREFIX) {
                true => param.name.clone(),
                false => format!("{PEFT_PREFIX}{}", param.name),
            };
            let dims = plan.shape_of(param).dims();
            tensors.push((name, dims, session.read_slot(param.slot)?));
        }
        let tensors = tensors
            .iter()
            .map(|(n, d, v)| (n.as_str(), *d, v.as_slice()));
        let base = recipe.model_folder();
        let base = base.map(|path| path.display().to_string());
        let folder = self.path.join(ADAPTER);
        Ok(write_adapter_folder(
            &folder,
            lora,
            base.as_deref(),
            tensors,
        )?)
    }

    /// Writes the session's parameters as `model/`, with the tokenizer of the data or of the folder
    /// the model came from.
    ///
    /// # Errors
    /// A device fault; a file that cannot be read or written.
    pub fn write_model<B: Backend>(
        &self,
        recipe: &Recipe,
        session: &mut Session<B>,
    ) -> Result<(), Error> {
        if let Some(lora) = recipe.lora.config() {
            return self.write_adapters(recipe, &lora, session);
        }
        let folder = self.path.join("model");
        let plan = session.plan().clone();
        let mut values = Vec::with_capacity(plan.params.len());
        for param in &plan.params {
            values.push(session.read_slot(param.slot)?);
        }
        let shapes = plan
            .params
            .iter()
            .map(|p| plan.slots.spec(p.slot).shape.dims());
        let tensors = plan.params.iter().zip(shapes).zip(&values);
        let tensors = tensors.map(|((param, dims), v)| (param.name.as_str(), dims, v.as_slice()));
        let json = match recipe.model_folder() {
            None => fresh_json(recipe),
            Some(path) => ModelFolder::open(&path)?.json().clone(),
        };
        let (config, files) = (recipe.model_config()?, companions(recipe));
        write_model_folder(&folder, &config, &json, tensors, &files)?;
        match tokenizer_file(recipe) {
            None => Ok(()),
            Some(file) => {
                let bytes = std::fs::read(&file).map_err(|source| CheckpointError::Read {
                    path: file.display().to_string(),
                    source,
                })?;
                let written = write_whole(&folder.join(TOKENIZER), &bytes);
                Ok(written.map_err(|source| self.failed("model/tokenizer.json", source))?)
            }
        }
    }

    fn write(&self, name: &str, text: &str) -> Result<(), RunError> {
        let written = write_whole(&self.path.join(name), text.as_bytes());
        written.map_err(|source| self.failed(name, source))
    }

    fn failed(&self, name: &str, source: std::io::Error) -> RunError {
        RunError::Write {
            path: self.path.join(name).display().to_string(),
            source,
        }
    }
}

/// Checks that a folder can be written into: it is absent or empty.
///
/// # Errors
/// [`RunError::FolderNotEmpty`], or [`RunError::Write`] for a path that is no folder.
pub fn check_empty(path: &Path) -> Result<(), RunError> {
    let folder = path.display().to_string();
    match std::fs::read_dir(path) {
        Ok(mut entries) => match entries.next() {
            None => Ok(()),
            Some(_) => Err(RunError::FolderNotEmpty { folder }),
        },
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(RunError::Write {
            path: folder,
            source,
        }),
    }
}

/// The keys of a fresh model's `config.json` that its sizes do not decide: a sum ends its line.
fn fresh_json(recipe: &Recipe) -> serde_json::Map<String, serde_json::Value> {
    let mut json = serde_json::Map::new();
    if recipe.data.source == DataSource::Sums {
        json.insert("eos_token_id".to_owned(), serde_json::json!(b'\n'));
    }
    json
}

/// The files beside the weights that a trained model keeps: those of the folder of the data's
/// tokenizer, or where the data is bytes those of the folder that the model came from. A generation
/// configuration belongs to a model and never comes with a tokenizer.
fn companions(recipe: &Recipe) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let model = recipe.model_folder();
    match (tokenizer_file(recipe), &model) {
        (Some(file), _) => {
            let folder = file.parent().unwrap_or(Path::new(""));
            // A lone file of another name says nothing of what stands beside it.
            if file.file_name().is_some_and(|name| name == TOKENIZER) {
                files = tokenizer_files(folder);
            }
        }
        (None, Some(folder)) => files = tokenizer_files(folder),
        (None, None) => {}
    }
    if let Some(folder) = model {
        files.extend(generation_file(&folder));
    }
    files
}

/// The `tokenizer.json` of the data.
fn tokenizer_file(recipe: &Recipe) -> Option<PathBuf> {
    let named = match recipe.data.tokenizer.as_str() {
        "bytes" => return None,
        path => recipe.resolve(path),
    };
    match named.is_dir() {
        true => Some(named.join(TOKENIZER)),
        false => Some(named),
    }
}

/// The recipe's canonical text as a run's folder keeps it. Relative paths are made absolute, since
/// they would mean something else there.
///
/// # Errors
/// A recipe changed in memory that cannot be written.
pub fn recipe_text(recipe: &Recipe) -> Result<String, Error> {
    let mut moved = recipe.clone();
    let absolute = |path: &str| {
        let resolved = recipe.resolve(path);
        let full = std::path::absolute(&resolved).unwrap_or(resolved);
        full.display().to_string()
    };
    if let Some(path) = &mut moved.data.path {
        *path = absolute(path);
    }
    if moved.data.tokenizer != "bytes" {
        moved.data.tokenizer = absolute(&moved.data.tokenizer);
    }
    if let ModelSection::Folder(folder) = &mut moved.model {
        folder.path = absolute(&folder.path);
    }
    if let Some(path) = &mut moved.lora.adapter {
        *path = absolute(path);
    }
    Ok(moved.to_toml()?)
}

/// The manifest's text, and how each call is executed here, which is not part of its hash.
fn manifest_text<B: Backend>(session: &Session<B>) -> String {
    let mut text = session.manifest().text().to_owned();
    let device = session.device();
    let _ = writeln!(text, "execution");
    let _ = writeln!(
        text,
        "  hash of the lines above {}",
        session.manifest().hash()
    );
    let _ = writeln!(text, "  device {}: {}", device.device, device.description);
    for execution in session.executions() {
        let _ = writeln!(text, "  {} {}", execution.call, execution.kernel);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_absent_or_empty_folder_is_claimed() {
        let folder = tempfile::tempdir().unwrap();
        RunFolder::claim(folder.path()).unwrap();
        let absent = folder.path().join("a/b");
        RunFolder::claim(&absent).unwrap();
        assert!(!absent.exists(), "claiming creates nothing");
        let file = folder.path().join("f");
        std::fs::write(&file, "x").unwrap();
        let refused = RunFolder::claim(folder.path()).unwrap_err();
        assert!(matches!(refused, RunError::FolderNotEmpty { .. }));
        assert_eq!(refused.exit_code().code(), 2);
        let refused = RunFolder::claim(&file).unwrap_err();
        assert!(matches!(refused, RunError::Write { .. }), "{refused}");
        assert_eq!(refused.exit_code().code(), 4);
    }

    #[test]
    fn the_recipe_that_is_kept_finds_its_files_from_anywhere() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("r.toml");
        let text = "name = \"r\"\nsteps = 1\n[model]\npath = \"m\"\n[data]\nsource = \"text\"\n\
                    path = \"t.txt\"\nbatch = 1\nseq_len = 8\n[optimizer]\nlr = 1.0\n";
        std::fs::write(&file, text).unwrap();
        let kept = recipe_text(&Recipe::from_path(&file).unwrap()).unwrap();
        let kept = Recipe::from_toml(&kept, "kept").unwrap();
        assert_eq!(kept.model_folder().unwrap(), folder.path().join("m"));
        let data = kept.data.path.clone().unwrap();
        assert_eq!(Path::new(&data), folder.path().join("t.txt"));
        assert_eq!(kept.data.tokenizer, "bytes");
    }
}
