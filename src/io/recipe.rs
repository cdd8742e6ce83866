//! The recipe: everything that decides the bits of a run, as one TOML file.
//!
//! A recipe may leave out whatever has a default. Its canonical text states every value, in a
//! fixed order, and the hash of a recipe is the BLAKE3 of that text; two recipes that mean the
//! same thing have the same hash however they are written.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::recipe_check;
pub use super::recipe_form::{MemorySection, defining_text};
pub use super::recipe_record::{DigestSection, EvaluationSection, MetricsSection};
use crate::data::WindowOrder;
use crate::error::{ConfigError, Expected, Found};
use crate::model::AnyConfig;
use crate::model::lora::{Base, LoraConfig, Norms, Projection};
use crate::model::mamba_config::Decay;
use crate::num::nf4::Quantisation;
use crate::shape::Math;

/// A run of training. Read one with [`Recipe::from_path`] or [`Recipe::from_toml`], which check
/// every value; a recipe changed in memory is checked by [`Recipe::validate`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Names the run's files: letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// Seeds the weights and the order of the data.
    pub seed: u64,
    /// Optimizer steps of the whole run.
    pub steps: u64,
    /// Steps the engine runs eagerly before it records the program; at least 2.
    pub warmup_steps: u32,
    /// The model, from a folder or from sizes.
    pub model: ModelSection,
    /// Adapters beside a frozen model. Left out of the canonical text where there are none.
    #[serde(default, skip_serializing_if = "LoraSection::is_absent")]
    pub lora: LoraSection,
    /// Where token ids come from and how they are batched.
    pub data: DataSection,
    /// AdamW and the gradient clip.
    pub optimizer: OptimizerSection,
    /// The learning rate over the run.
    pub schedule: ScheduleSection,
    /// The numeric domain.
    pub precision: PrecisionSection,
    /// What a step keeps in memory. Left out of the canonical text while it says nothing.
    #[serde(default, skip_serializing_if = "MemorySection::is_absent")]
    pub memory: MemorySection,
    /// What a run saves.
    pub checkpoint: CheckpointSection,
    /// What the golden of this recipe covers.
    pub golden: GoldenSection,
    /// When a run records the digest of its weights. Left out of the canonical text while it says
    /// nothing, so that a recipe without it keeps its hash.
    #[serde(default, skip_serializing_if = "DigestSection::is_absent")]
    pub digest: DigestSection,
    /// Evaluation between steps; like `digest` left out of the canonical text while it says nothing.
    #[serde(default, skip_serializing_if = "EvaluationSection::is_absent")]
    pub evaluation: EvaluationSection,
    /// What is recorded beside loss and norm; left out of the canonical text while it says nothing.
    #[serde(default, skip_serializing_if = "MetricsSection::is_absent")]
    pub metrics: MetricsSection,
    /// What was read and from where; not part of the recipe's meaning.
    #[serde(skip)]
    pub(super) origin: Origin,
}

/// The text's own keys and its place, kept so that an override derives defaults anew.
#[derive(Clone, Debug, Default)]
pub(super) struct Origin {
    pub file: String,
    pub folder: PathBuf,
    pub written: toml::Table,
}

impl PartialEq for Origin {
    /// Two recipes are equal when their values are, wherever they were read.
    fn eq(&self, _: &Origin) -> bool {
        true
    }
}

/// `[model]`: a Hugging Face folder, or a family and its sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ModelSection {
    /// Configuration and weights come from a folder.
    Folder(FolderSection),
    /// Weights are drawn afresh.
    Fresh(AnyConfig),
}

/// `[model]` with `path`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FolderSection {
    /// The folder, relative to the recipe file's folder.
    pub path: String,
}

/// `[lora]`: every key is present when `rank` is, and none otherwise.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoraSection {
    /// Rank of each adapter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// The adapters' sum is multiplied by `alpha / rank`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f64>,
    /// The projections with an adapter: some of q, k, v, o, gate, up, down with commas between them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub targets: Option<String>,
    /// Whether the norms are trained beside the adapters: `frozen` or `trained`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub norms: Option<String>,
    /// How the projections of the base are stored: `plain`, `nf4` or `nf4-double`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// A PEFT folder whose adapters are trained on, relative to the recipe file's folder; drawn afresh
    /// when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
}

impl LoraSection {
    fn is_absent(&self) -> bool {
        *self == LoraSection::default()
    }

    /// The adapters; `None` where the whole model is trained.
    pub fn config(&self) -> Option<LoraConfig> {
        let rank = self.rank?;
        let listed = |p: &Projection| {
            let name = p.module().trim_end_matches("_proj");
            let targets = self.targets.as_deref();
            targets.is_none_or(|t| t.split(',').any(|n| n.trim() == name))
        };
        Some(LoraConfig {
            rank,
            alpha: self.alpha.unwrap_or(rank as f64),
            targets: Projection::ALL.into_iter().filter(listed).collect(),
            norms: match self.norms.as_deref() {
                Some("trained") => Norms::Trained,
                _ => Norms::Frozen,
            },
            base: match self.base.as_deref() {
                Some("nf4") => Base::Nf4(Quantisation::Once),
                Some("nf4-double") => Base::Nf4(Quantisation::Double),
                _ => Base::Plain,
            },
        })
    }
}

/// Where token ids come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataSource {
    /// Generated sums; needs no file.
    Sums,
    /// A text file.
    Text,
    /// Raw little-endian token ids.
    Bin,
    /// Token files with the header that llm.c writes.
    Llmc,
}

/// How raw token ids are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenDtype {
    /// Two bytes an id.
    U16,
    /// Four bytes an id.
    U32,
}

/// `[data]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataSection {
    /// The kind of source.
    pub source: DataSource,
    /// The file, relative to the recipe file's folder; present unless the source is sums.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// `bytes`, or the path of a `tokenizer.json`, relative to the recipe file's folder.
    pub tokenizer: String,
    /// Present when the source is bin; u16 unless written otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_dtype: Option<TokenDtype>,
    /// Sequences in one optimizer step.
    pub batch: usize,
    /// Sequences that are computed at once; a divisor of `batch` in whole grains, and all of them when absent.
    /// Decides memory and no bit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro_batch: Option<usize>,
    /// Tokens in one sequence.
    pub seq_len: usize,
    /// Sequences of one grain: sums over tokens are combined by a tree over grains. Divides `batch`.
    pub grain: usize,
    /// Tokens in one piece of a weight gradient's sum; follows from grain and size when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub piece_tokens: Option<usize>,
    /// The fraction of the data kept for validation, 0 to 0.5.
    pub validation: f64,
    /// Which window of a file follows which; left out of the canonical text where windows are shuffled.
    #[serde(default, skip_serializing_if = "WindowOrder::is_shuffled")]
    pub windows: WindowOrder,
}

/// `[optimizer]`: AdamW, whose decay is decoupled, and the clip of the global norm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerSection {
    /// The peak learning rate.
    pub lr: f64,
    /// Decay of the mean of gradients, in [0, 1).
    pub beta1: f64,
    /// Decay of the mean of squared gradients, in [0, 1).
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// The greatest global gradient norm; 0 turns the clip off.
    pub clip_norm: f64,
    /// A step whose norm before the clip exceeds this is dropped whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spike_norm: Option<f64>,
    /// To which tensors weight decay applies; as the model's reference implementation marks them when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decay: Option<Decay>,
}

/// The course of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleKind {
    /// Stays at the peak.
    Constant,
    /// Half a cosine from the peak to the floor.
    Cosine,
    /// A straight line from the peak to the floor.
    Linear,
}

/// `[schedule]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleSection {
    /// The course after the warm-up.
    pub kind: ScheduleKind,
    /// Steps over which the learning rate rises linearly to its peak.
    pub warmup: u64,
    /// The final learning rate as a fraction of the peak, 0 to 1.
    pub floor: f64,
}

/// `[precision]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrecisionSection {
    /// The numeric domain, the name of a [`Math`]'s.
    pub domain: String,
    /// Good steps after which the loss scale doubles; present when the domain is f16's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub growth_interval: Option<u32>,
}

impl PrecisionSection {
    /// How products are computed.
    pub fn math(&self) -> Math {
        Math::of_domain(&self.domain).unwrap_or_default()
    }
}

/// `[checkpoint]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointSection {
    /// Whether the run ends by writing a model folder.
    pub save_model: bool,
    /// A checkpoint is saved after every so many steps and after the last; never when absent. Like
    /// the two keys below it is part of the canonical text only where it is written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every: Option<u64>,
    /// Only so many of the newest checkpoints are kept; all when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_last: Option<u64>,
    /// Checkpoints at multiples of this step are kept whatever `keep_last` says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_every: Option<u64>,
    /// Whether the checkpoint with the lowest validation loss is saved and kept; `Some(true)` or absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_best: Option<bool>,
}

/// `[golden]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GoldenSection {
    /// Steps the golden covers.
    pub steps: u64,
    /// First steps of which every call is traced; at most `steps`.
    pub trace_steps: u64,
}

impl Recipe {
    /// Reads a recipe file.
    ///
    /// # Errors
    /// [`ConfigError::Read`], or whatever [`Recipe::from_toml`] finds.
    pub fn from_path(path: &Path) -> Result<Recipe, ConfigError> {
        let file = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: file.clone(),
            source,
        })?;
        let mut recipe = Recipe::from_toml(&text, &file)?;
        recipe.origin.folder = path.parent().unwrap_or(Path::new("")).to_path_buf();
        Ok(recipe)
    }

    /// Reads a recipe from TOML text; `file_name` is what errors call it. Relative paths in it
    /// start from the working folder.
    ///
    /// # Errors
    /// [`ConfigError`]: a syntax error with its line and column, an unknown key, a missing one,
    /// or a value that does not fit.
    pub fn from_toml(text: &str, file_name: &str) -> Result<Recipe, ConfigError> {
        let written = recipe_check::parse(text, file_name)?;
        let origin = Origin {
            file: file_name.to_string(),
            folder: PathBuf::new(),
            written,
        };
        recipe_check::build(origin)
    }

    /// The canonical text: every value, defaults included, in a fixed order. Reading it gives
    /// the same recipe.
    ///
    /// # Errors
    /// [`ConfigError::Unwritable`] when a field changed in memory exceeds TOML's integers.
    pub fn to_toml(&self) -> Result<String, ConfigError> {
        // The text writer takes any integer; the table takes only those that TOML defines.
        self.table()?;
        toml::to_string(self).map_err(|e| self.unwritable(&e))
    }

    /// The BLAKE3 of the canonical text, in hex.
    ///
    /// # Errors
    /// As [`Recipe::to_toml`].
    pub fn hash(&self) -> Result<String, ConfigError> {
        Ok(blake3::hash(self.to_toml()?.as_bytes())
            .to_hex()
            .to_string())
    }

    /// Applies one override `key=value`, such as `optimizer.lr=3e-4`. The value is read as TOML
    /// and as plain text when it is not TOML. Defaults that follow from other keys follow the
    /// new value. A refused override leaves the recipe as it was.
    ///
    /// # Errors
    /// [`ConfigError::Override`] when the text is not `key=value`; otherwise as
    /// [`Recipe::from_toml`].
    pub fn set(&mut self, text: &str) -> Result<(), ConfigError> {
        self.set_all([text])
    }

    /// Applies several overrides at once, as [`Recipe::set`] does one: only the outcome has to fit,
    /// so two keys that depend on each other can change together. Later ones win.
    ///
    /// # Errors
    /// As [`Recipe::set`]; none is applied then.
    pub fn set_all<'a>(
        &mut self,
        texts: impl IntoIterator<Item = &'a str>,
    ) -> Result<(), ConfigError> {
        let mut origin = self.origin.clone();
        // Fields changed in memory since the recipe was read are not in what was written.
        if recipe_check::build(origin.clone()).as_ref().ok() != Some(self) {
            origin.written = self.table()?;
        }
        for text in texts {
            recipe_check::put(&mut origin.written, text, &origin.file)?;
        }
        *self = recipe_check::build(origin)?;
        Ok(())
    }

    /// Checks every value again, for a recipe that was changed in memory.
    ///
    /// # Errors
    /// As [`Recipe::from_toml`].
    pub fn validate(&self) -> Result<(), ConfigError> {
        let written = self.table()?;
        let origin = Origin {
            written,
            ..self.origin.clone()
        };
        recipe_check::build(origin).map(|_| ())
    }

    /// A path of the recipe, resolved against the recipe file's folder.
    pub fn resolve(&self, path: &str) -> PathBuf {
        self.origin.folder.join(path)
    }

    /// Whether some data is kept from training, to evaluate on.
    pub fn sets_data_aside(&self) -> bool {
        self.data.source == DataSource::Sums || self.data.validation > 0.0
    }

    /// The file that errors name.
    pub fn file(&self) -> &str {
        &self.origin.file
    }

    /// The folder of `[model] path`, resolved; `None` when the model is fresh.
    pub fn model_folder(&self) -> Option<PathBuf> {
        match &self.model {
            ModelSection::Folder(folder) => Some(self.resolve(&folder.path)),
            ModelSection::Fresh(_) => None,
        }
    }

    /// The model's configuration: the `[model]` section itself, or the folder's `config.json`.
    ///
    /// # Errors
    /// [`ConfigError`] when the folder's configuration cannot be used.
    pub fn model_config(&self) -> Result<AnyConfig, ConfigError> {
        match &self.model {
            ModelSection::Fresh(config) => Ok(config.clone()),
            ModelSection::Folder(folder) => {
                Ok(super::model_json::read(&self.resolve(&folder.path))?.0)
            }
        }
        .map(|config| config.with_decay(self.optimizer.decay.unwrap_or_default()))
    }

    /// Checks that the model has as many positions as `data.seq_len` asks for.
    ///
    /// # Errors
    /// [`ConfigError::Value`] with both numbers; a folder's configuration that cannot be used.
    pub fn check_positions(&self) -> Result<(), ConfigError> {
        let positions = match self.model_config()?.positions() {
            Some(positions) if self.data.seq_len > positions => positions,
            _ => return Ok(()),
        };
        Err(ConfigError::Value {
            file: self.origin.file.clone(),
            key: "data.seq_len",
            expected: Expected::AtMost {
                key: "the model's positions",
                value: positions as u64,
            },
            found: Found::Integer(self.data.seq_len as i64),
        })
    }

    fn table(&self) -> Result<toml::Table, ConfigError> {
        toml::Table::try_from(self).map_err(|e| self.unwritable(&e))
    }

    fn unwritable(&self, error: &toml::ser::Error) -> ConfigError {
        ConfigError::Unwritable {
            file: self.origin.file.clone(),
            message: error.to_string(),
        }
    }
}
