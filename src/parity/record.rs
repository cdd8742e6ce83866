//! Reading the folder of a recorded run.

use std::path::Path;

use serde::Deserialize;

use crate::data::{Batch, IGNORE};
use crate::engine::Hyper;
use crate::error::{CheckpointError, Error, ParityError};
use crate::io::{AdapterFolder, ModelFolder, TensorFile};
use crate::model::lora::Base;
use crate::model::mamba_config::Decay;
use crate::num::nf4::Quantisation;
use crate::plan::{Plan, PlanConfig};
use crate::shape::Math;

const JSON: &str = "reference.json";
const TENSORS: &str = "reference.safetensors";
/// The adapters' folder, where the record is of adapters.
const ADAPTER: &str = "adapter";
/// The folder of the model under the adapters.
const BASE: &str = "base";

/// A recorded run: the model it started from, and what it computed.
#[derive(Debug)]
pub struct Reference {
    pub(super) model: ModelFolder,
    /// The adapters that are trained, the model being their frozen base.
    pub(super) adapter: Option<AdapterFolder>,
    pub(super) tensors: TensorFile,
    pub(super) json: ReferenceJson,
    json_path: String,
}

/// The part of `reference.json` that is read.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct ReferenceJson {
    hyper: HyperJson,
    pub steps: usize,
    pub batch: usize,
    pub seq_len: usize,
    /// The target that marks an ignored position.
    #[serde(default = "default_ignore")]
    ignore_index: i32,
    pub loss: Vec<f64>,
    pub grad_norm: Vec<f64>,
    trainable: Vec<String>,
    /// Whether the projections of the base were quantised first.
    #[serde(default)]
    nf4: bool,
}

#[derive(Clone, Debug, Deserialize)]
struct HyperJson {
    lr: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    clip_norm: Option<f64>,
}

fn default_ignore() -> i32 {
    IGNORE
}

impl Reference {
    /// Opens a folder and checks that its parts belong together.
    ///
    /// # Errors
    /// [`ParityError`] names the file and what was expected and found.
    pub fn open(folder: &Path) -> Result<Self, ParityError> {
        let path = folder.join(JSON);
        let json_path = path.display().to_string();
        let text = std::fs::read_to_string(&path).map_err(|source| ParityError::Read {
            path: json_path.clone(),
            source,
        })?;
        let json: ReferenceJson = serde_json::from_str(&text).map_err(|e| ParityError::Json {
            file: json_path.clone(),
            line: e.line(),
            column: e.column(),
            message: e.to_string(),
        })?;
        json.check(&json_path)?;
        let has_adapter = folder.join(ADAPTER).is_dir();
        if !has_adapter && json.trainable.iter().any(|name| name.contains(".lora_")) {
            return Err(ParityError::Adapters {
                folder: folder.display().to_string(),
            });
        }
        let (model, adapter) = match has_adapter {
            false => (ModelFolder::open(folder)?, None),
            true => {
                let adapter = AdapterFolder::open(&folder.join(ADAPTER))?;
                (ModelFolder::open(&folder.join(BASE))?, Some(adapter))
            }
        };
        Ok(Reference {
            model,
            adapter,
            tensors: TensorFile::open(&folder.join(TENSORS))?,
            json,
            json_path,
        })
    }

    /// Steps, sequences a step and tokens a sequence.
    pub fn sizes(&self) -> [usize; 3] {
        [self.json.steps, self.json.batch, self.json.seq_len]
    }

    /// The model as a program of the recorded sizes; sums over tokens are one grain.
    ///
    /// # Errors
    /// Adapters beside a family that has none; sizes that an op does not support.
    pub(super) fn plan(&self, math: Math) -> Result<Plan, Error> {
        let json = &self.json;
        let config = PlanConfig {
            beta1: json.hyper.beta1,
            beta2: json.hyper.beta2,
            eps: json.hyper.eps,
            math,
            ..PlanConfig::of(json.batch, json.seq_len)
        };
        // A record's optimizer decays every tensor of two or more dimensions.
        let model = self.model.config().clone().with_decay(Decay::Matrices);
        let lora = self.adapter.as_ref().map(|adapter| {
            let mut lora = adapter.config().clone();
            if json.nf4 {
                lora.base = Base::Nf4(Quantisation::Once);
            }
            lora
        });
        let file = &self.json_path;
        Ok(Plan::build(model.adapted(lora, file)?.as_ref(), config)?)
    }

    /// Checks that the record trains exactly the parameters of the plan.
    pub(super) fn check_trainable(&self, plan: &Plan) -> Result<(), ParityError> {
        let file = self.json_path.clone();
        let trainable = &self.json.trainable;
        let mut trained = plan.params.iter().filter(|p| p.state.is_some());
        let known = |name: &&String| trained.clone().any(|p| p.name == **name);
        if let Some(tensor) = trainable.iter().find(|name| !known(name)).cloned() {
            return Err(ParityError::UnknownTrainable { file, tensor });
        }
        match trained.find(|p| !trainable.contains(&p.name)) {
            None => Ok(()),
            Some(p) => Err(ParityError::Frozen {
                file,
                tensor: p.name.clone(),
            }),
        }
    }

    pub(super) fn hyper(&self) -> Hyper {
        let h = &self.json.hyper;
        Hyper {
            lr: h.lr,
            beta1: h.beta1,
            beta2: h.beta2,
            eps: h.eps,
            weight_decay: h.weight_decay,
            clip_norm: h.clip_norm,
            spike_norm: None,
        }
    }

    /// The batch of each step.
    pub(super) fn batches(&self) -> Result<Vec<Batch>, CheckpointError> {
        let shape = self.sizes();
        let ids = self.tensors.read_i32("input_ids", &shape)?;
        let targets = self.tensors.read_i32("targets", &shape)?;
        let [_, batch, seq_len] = shape;
        let positions = batch * seq_len;
        let ignore = self.json.ignore_index;
        let steps = ids.chunks(positions).zip(targets.chunks(positions));
        let target = |&t: &i32| if t == ignore { IGNORE } else { t };
        Ok(steps
            .map(|(ids, targets)| Batch {
                batch,
                seq_len,
                input_ids: ids.to_vec(),
                targets: targets.iter().map(target).collect(),
                weights: vec![1.0; positions],
                normaliser: None,
            })
            .collect())
    }
}

impl ReferenceJson {
    fn check(&self, file: &str) -> Result<(), ParityError> {
        let sizes = [
            ("steps", self.steps),
            ("batch", self.batch),
            ("seq_len", self.seq_len),
        ];
        if let Some((field, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            let file = file.to_owned();
            return Err(ParityError::Empty { file, field });
        }
        let lists = [
            ("loss", self.loss.len()),
            ("grad_norm", self.grad_norm.len()),
        ];
        match lists.into_iter().find(|(_, found)| *found != self.steps) {
            None => Ok(()),
            Some((field, found)) => Err(ParityError::Count {
                file: file.to_owned(),
                field,
                expected: self.steps,
                found,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn fixture(name: &str) -> PathBuf {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        root.join("tests/fixtures").join(name)
    }

    /// A copy of a fixture whose `reference.json` has been changed.
    fn changed(change: impl Fn(&mut serde_json::Value)) -> (tempfile::TempDir, ParityResult) {
        let folder = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(fixture("llama-tied")).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
        let path = folder.path().join(JSON);
        let mut json = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut json);
        std::fs::write(&path, json.to_string()).unwrap();
        let opened = Reference::open(folder.path()).and_then(|reference| {
            reference.check_trainable(&reference.plan(Math::F32).expect("a plan"))?;
            Ok(reference)
        });
        (folder, opened)
    }

    type ParityResult = Result<Reference, ParityError>;

    #[test]
    fn a_record_that_does_not_fit_is_refused() {
        assert!(changed(|_| {}).1.is_ok());
        let refused = |change: &dyn Fn(&mut serde_json::Value)| changed(change).1.unwrap_err();
        assert!(matches!(
            refused(&|j| j["steps"] = 0.into()),
            ParityError::Empty { field: "steps", .. }
        ));
        assert!(matches!(
            refused(&|j| j["loss"] = vec![1.0].into()),
            ParityError::Count {
                field: "loss",
                expected: 3,
                found: 1,
                ..
            }
        ));
        assert!(matches!(
            refused(&|j| j["loss"] = "x".into()),
            ParityError::Json { .. }
        ));
        assert!(matches!(
            refused(&|j| j["trainable"][0] = "model.other".into()),
            ParityError::UnknownTrainable { tensor, .. } if tensor == "model.other"
        ));
        assert!(matches!(
            refused(&|j| drop(j["trainable"].as_array_mut().unwrap().pop())),
            ParityError::Frozen { .. }
        ));
        assert!(matches!(
            refused(&|j| j["trainable"][0] = "x.lora_A.weight".into()),
            ParityError::Adapters { .. }
        ));
    }

    #[test]
    fn batches_of_other_sizes_are_refused_by_the_file_of_tensors() {
        let (_folder, reference) = changed(|j| j["batch"] = 4.into());
        let refused = reference.unwrap().batches().unwrap_err();
        assert!(
            matches!(refused, CheckpointError::WrongShape { tensor, .. } if tensor == "input_ids")
        );
    }

    #[test]
    fn a_folder_without_a_record_or_without_weights_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let missing = Reference::open(folder.path());
        assert!(matches!(missing, Err(ParityError::Read { .. })));
        for file in [JSON, "config.json"] {
            let from = fixture("llama-tied").join(file);
            std::fs::copy(from, folder.path().join(file)).unwrap();
        }
        let no_weights = Reference::open(folder.path());
        assert!(matches!(no_weights, Err(ParityError::Checkpoint(_))));
    }
}
