//! A Hugging Face model folder: `config.json` and the weights in one file or in shards.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::atomic::write_atomic;
use super::model_json;
use super::tensors::{TensorEntry, TensorFile};
use super::tensors_header::json_error;
use super::tensors_write::{F32Tensor, write_f32_tensors};
use crate::error::CheckpointError;
use crate::model::AnyConfig;
use crate::shape::Shape;

/// The weights when they stand in one file.
const WEIGHTS: &str = "model.safetensors";
/// The index of the weights when they stand in shards.
const INDEX: &str = "model.safetensors.index.json";
/// The output head.
const HEAD: &str = "lm_head.weight";
/// Buffers that old versions saved and that follow from the configuration.
const HARMLESS_SUFFIX: &str = ".rotary_emb.inv_freq";

/// An open model folder. The weights are read one tensor at a time.
#[derive(Debug)]
pub struct ModelFolder {
    path: PathBuf,
    config: AnyConfig,
    json: Map<String, Value>,
    files: Vec<TensorFile>,
    /// Which file holds each tensor.
    places: BTreeMap<String, usize>,
}

impl ModelFolder {
    /// Opens a folder: reads its configuration and checks the header of every weights file, and
    /// that index and shards agree.
    ///
    /// # Errors
    /// [`CheckpointError`]; a configuration that cannot be used is [`CheckpointError::Config`].
    pub fn open(path: &Path) -> Result<ModelFolder, CheckpointError> {
        let (config, json) = model_json::read(path)?;
        let (single, index) = (path.join(WEIGHTS), path.join(INDEX));
        let (files, places) = if single.exists() {
            let file = TensorFile::open(&single)?;
            let places = file.names().map(|name| (name.to_string(), 0)).collect();
            (vec![file], places)
        } else if index.exists() {
            open_shards(path, &index)?
        } else {
            return Err(CheckpointError::NoWeights {
                folder: path.display().to_string(),
            });
        };
        Ok(ModelFolder {
            path: path.to_path_buf(),
            config,
            json,
            files,
            places,
        })
    }

    /// The model's configuration.
    pub fn config(&self) -> &AnyConfig {
        &self.config
    }

    /// Every key of `config.json` as it stands there, to be written back.
    pub fn json(&self) -> &Map<String, Value> {
        &self.json
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of the tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// Type, shape and place of a tensor.
    ///
    /// # Errors
    /// [`CheckpointError::MissingTensor`].
    pub fn entry(&self, name: &str) -> Result<&TensorEntry, CheckpointError> {
        self.file_of(name)?.entry(name)
    }

    /// A tensor as f32; see [`TensorFile::read_f32`].
    ///
    /// # Errors
    /// [`CheckpointError`]: missing, of another shape or type, or unreadable.
    pub fn read_f32(&self, name: &str, expected: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        self.file_of(name)?.read_f32(name, expected)
    }

    /// A tensor of U8; see [`TensorFile::read_u8`].
    ///
    /// # Errors
    /// [`CheckpointError`]: missing, of another shape or type, or unreadable.
    pub fn read_u8(&self, name: &str, expected: &[usize]) -> Result<Vec<u8>, CheckpointError> {
        self.file_of(name)?.read_u8(name, expected)
    }

    /// Checks that the model has a place for every tensor of the folder, `used` being the names
    /// it reads. Rotary frequencies that old versions saved are passed over, and so is a saved
    /// head that is tied to the embedding and equal to it.
    ///
    /// # Errors
    /// [`CheckpointError::UnexpectedTensors`] lists all the others;
    /// [`CheckpointError::TiedDiffers`] when a saved head is not the embedding it is tied to.
    pub fn check_all_used(&self, used: &[&str]) -> Result<(), CheckpointError> {
        let used: BTreeSet<&str> = used.iter().copied().collect();
        let mut unexpected = Vec::new();
        for name in self.names().filter(|name| !used.contains(name)) {
            if name == HEAD && self.config.tie_embeddings() {
                self.check_tied_head()?;
            } else if !name.ends_with(HARMLESS_SUFFIX) {
                unexpected.push(name.to_string());
            }
        }
        if unexpected.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::UnexpectedTensors {
            folder: self.path.display().to_string(),
            tensors: unexpected,
        })
    }

    fn check_tied_head(&self) -> Result<(), CheckpointError> {
        let shape = [self.config.vocab_size(), self.config.d_model()];
        let name = self.config.embedding();
        let head = self.read_f32(HEAD, &shape)?;
        let embedding = self.read_f32(name, &shape)?;
        tied_equal(self.file_of(HEAD)?.path(), (name, &embedding), &head)
    }

    fn file_of(&self, name: &str) -> Result<&TensorFile, CheckpointError> {
        let place = self.places.get(name).and_then(|i| self.files.get(*i));
        place.ok_or_else(|| CheckpointError::MissingTensor {
            file: match self.files.as_slice() {
                [file] => file.path().to_string(),
                _ => self.path.join(INDEX).display().to_string(),
            },
            tensor: name.to_string(),
        })
    }
}

/// Checks that a head given beside the embedding it is tied to has the embedding's bits, so that
/// leaving it out of the file loses nothing.
fn check_tied(
    tensors: &[F32Tensor<'_>],
    file: &str,
    name: &'static str,
) -> Result<(), CheckpointError> {
    let find = |wanted| tensors.iter().find(|(name, ..)| *name == wanted);
    let Some((_, head_shape, head)) = find(HEAD) else {
        return Ok(());
    };
    let Some((_, shape, embedding)) = find(name) else {
        return Err(CheckpointError::MissingTensor {
            file: file.to_string(),
            tensor: name.to_string(),
        });
    };
    if head_shape != shape || head.len() != embedding.len() {
        return Err(CheckpointError::WrongShape {
            file: file.to_string(),
            tensor: HEAD.to_string(),
            expected: Shape::new(*shape),
            found: Shape::new(*head_shape),
        });
    }
    tied_equal(file, (name, embedding), head)
}

/// Checks that a tied head has the embedding's bits.
fn tied_equal(
    file: &str,
    (name, embedding): (&str, &[f32]),
    head: &[f32],
) -> Result<(), CheckpointError> {
    let pairs = embedding.iter().zip(head);
    match pairs
        .enumerate()
        .find(|(_, (a, b))| a.to_bits() != b.to_bits())
    {
        Some((index, (expected, found))) => Err(CheckpointError::TiedDiffers {
            file: file.to_string(),
            tensor: HEAD.to_string(),
            tied_to: name.to_string(),
            index,
            expected: *expected,
            found: *found,
        }),
        None => Ok(()),
    }
}

/// The part of an index that is read.
#[derive(serde::Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Opens every shard of an index and checks that both name the same tensors.
fn open_shards(
    folder: &Path,
    index: &Path,
) -> Result<(Vec<TensorFile>, BTreeMap<String, usize>), CheckpointError> {
    let index_name = index.display().to_string();
    let bytes = std::fs::read(index).map_err(|source| CheckpointError::Read {
        path: index_name.clone(),
        source,
    })?;
    let Index { weight_map } =
        serde_json::from_slice(&bytes).map_err(|e| json_error(&index_name, &e))?;
    let mut files: Vec<TensorFile> = Vec::new();
    let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
    let mut places = BTreeMap::new();
    for (tensor, shard) in &weight_map {
        let number = match numbers.get(shard.as_str()) {
            Some(number) => *number,
            None => {
                // An index must not lead the reader out of its folder.
                if Path::new(shard).file_name() != Some(shard.as_ref()) {
                    return Err(CheckpointError::ShardName {
                        file: index_name,
                        tensor: tensor.clone(),
                        found: shard.clone(),
                    });
                }
                files.push(TensorFile::open(&folder.join(shard))?);
                numbers.insert(shard, files.len() - 1);
                files.len() - 1
            }
        };
        files[number].entry(tensor)?;
        places.insert(tensor.clone(), number);
    }
    for (shard, number) in numbers {
        let stray = files[number]
            .names()
            .find(|name| places.get(*name) != Some(&number));
        if let Some(tensor) = stray {
            return Err(CheckpointError::NotInIndex {
                file: index_name,
                tensor: tensor.to_string(),
                shard: shard.to_string(),
            });
        }
    }
    Ok((files, places))
}

/// Writes a folder that transformers loads: `model.safetensors`, `config.json` and copies of the
/// tokenizer files, each replaced whole or not at all.
///
/// `extra` holds further keys of `config.json`, such as the map of the folder that was read; keys
/// that the configuration decides are set anew. A tied head is not written: it has to have the
/// embedding's bits and stands in the file once.
///
/// # Errors
/// [`CheckpointError`]: tensors that cannot be written, a head that differs from the embedding it
/// is tied to, or a file that cannot be written or copied.
pub fn write_model_folder<'a>(
    folder: &Path,
    config: &AnyConfig,
    extra: &Map<String, Value>,
    tensors: impl IntoIterator<Item = F32Tensor<'a>>,
    tokenizer_files: &[PathBuf],
) -> Result<(), CheckpointError> {
    config.validate()?;
    let mut tensors: Vec<F32Tensor<'a>> = tensors.into_iter().collect();
    let weights = folder.join(WEIGHTS);
    if config.tie_embeddings() {
        check_tied(&tensors, &weights.display().to_string(), config.embedding())?;
        tensors.retain(|(name, ..)| *name != HEAD);
    }
    let names = tokenizer_names(tokenizer_files)?;
    std::fs::create_dir_all(folder).map_err(|source| CheckpointError::Write {
        path: folder.display().to_string(),
        source,
    })?;
    write_f32_tensors(&weights, tensors)?;
    let text = model_json::write(config, extra);
    write_atomic(&folder.join(model_json::FILE), |out| {
        out.write_all(text.as_bytes())
    })?;
    for (source, name) in tokenizer_files.iter().zip(names) {
        copy(source, &folder.join(name))?;
    }
    Ok(())
}

/// A tokenizer's file of the `tokenizers` package.
pub const TOKENIZER: &str = "tokenizer.json";

/// The files of a tokenizer that a trained copy keeps.
const TOKENIZER_FILES: [&str; 5] = [
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
];

/// The file that says how a model generates, which never comes with a tokenizer alone.
const GENERATION: &str = "generation_config.json";

/// Those of a folder's files that belong to its tokenizer.
pub fn tokenizer_files(folder: &Path) -> Vec<PathBuf> {
    let files = TOKENIZER_FILES.iter().map(|name| folder.join(name));
    files.filter(|file| file.is_file()).collect()
}

/// The file of a folder that says how its model generates, where there is one.
pub fn generation_file(folder: &Path) -> Option<PathBuf> {
    Some(folder.join(GENERATION)).filter(|file| file.is_file())
}

/// Those of a folder's files besides weights and configuration that a copy of its model keeps.
pub fn companion_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = tokenizer_files(folder);
    files.extend(generation_file(folder));
    files
}

/// The names under which tokenizer files are copied; none may replace the model's own files.
fn tokenizer_names(files: &[PathBuf]) -> Result<Vec<&std::ffi::OsStr>, CheckpointError> {
    let own = [WEIGHTS, INDEX, model_json::FILE];
    let name = |path: &'_ PathBuf| CheckpointError::TokenizerName {
        path: path.display().to_string(),
    };
    files
        .iter()
        .map(|path| {
            path.file_name()
                .filter(|n| !own.iter().any(|own| n == own))
                .ok_or_else(|| name(path))
        })
        .collect()
}

/// Copies a file; a file copied onto itself stays as it is.
fn copy(from: &Path, to: &Path) -> Result<(), CheckpointError> {
    let mut source = File::open(from).map_err(|source| CheckpointError::Read {
        path: from.display().to_string(),
        source,
    })?;
    write_atomic(to, |out| io::copy(&mut source, out).map(|_| ()))
}

#[cfg(test)]
#[path = "model_folder_tests.rs"]
mod tests;
