//! PEFT adapter folders: `adapter_config.json` and `adapter_model.safetensors`.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::atomic::write_atomic;
use super::tensors::TensorFile;
use super::tensors_header::json_error;
use super::tensors_write::{F32Tensor, write_f32_tensors};
use crate::error::CheckpointError;
use crate::model::lora::{Base, LoraConfig, Norms, Projection};

/// The configuration's file.
pub const CONFIG: &str = "adapter_config.json";
/// The tensors' file.
pub const TENSORS: &str = "adapter_model.safetensors";

/// An open adapter folder. Its tensors have the names that adapters have here.
#[derive(Debug)]
pub struct AdapterFolder {
    path: String,
    config: LoraConfig,
    base: Option<String>,
    tensors: TensorFile,
}

/// The part of `adapter_config.json` that is read.
#[derive(Deserialize)]
struct Json {
    peft_type: String,
    r: usize,
    lora_alpha: f64,
    target_modules: Value,
    base_model_name_or_path: Option<String>,
    /// Everything else: what changes the function is refused.
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// How the modules that hold norms end; PEFT takes a name for all modules that end so.
const NORMS: &str = "norm";

/// Keys that make another function of an adapter unless they are null, false or empty.
const OTHER_FUNCTIONS: [&str; 10] = [
    "use_dora",
    "use_rslora",
    "use_qalora",
    "lora_bias",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "exclude_modules",
    "target_parameters",
];

impl AdapterFolder {
    /// Opens a folder and checks its configuration and the header of its tensors.
    ///
    /// # Errors
    /// [`CheckpointError::Adapter`] for a key that asks for what is not done here; files that are
    /// missing or damaged.
    pub fn open(path: &Path) -> Result<AdapterFolder, CheckpointError> {
        let config_path = path.join(CONFIG);
        let file = config_path.display().to_string();
        let bytes = std::fs::read(&config_path).map_err(|source| CheckpointError::Read {
            path: file.clone(),
            source,
        })?;
        let json: Json = serde_json::from_slice(&bytes).map_err(|e| json_error(&file, &e))?;
        Ok(AdapterFolder {
            path: path.display().to_string(),
            base: json.base_model_name_or_path.clone(),
            config: config_of(json, &file)?,
            tensors: TensorFile::open(&path.join(TENSORS))?,
        })
    }

    /// Rank, alpha and targets.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// The name or the path of the base that the adapters were trained for, where the folder names one.
    pub fn base(&self) -> Option<&str> {
        self.base.as_deref()
    }

    /// Checks that the folder's adapters are applied as `wanted` says; their ranks and places show in
    /// the tensors' shapes and names.
    ///
    /// # Errors
    /// [`CheckpointError::Adapter`] for another rank or another alpha.
    pub fn check_scale(&self, wanted: &LoraConfig) -> Result<(), CheckpointError> {
        let file = format!("{}/{CONFIG}", self.path);
        let found = &self.config;
        if found.rank != wanted.rank {
            return Err(refused(&file, "r", "the recipe's lora.rank", found.rank));
        }
        if found.alpha != wanted.alpha {
            let expected = "the recipe's lora.alpha";
            return Err(refused(&file, "lora_alpha", expected, found.alpha));
        }
        Ok(())
    }

    /// A tensor as f32; see [`TensorFile::read_f32`].
    ///
    /// # Errors
    /// [`CheckpointError`]: missing, of another shape or type, or unreadable.
    pub fn read_f32(&self, name: &str, expected: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        self.tensors.read_f32(name, expected)
    }

    /// Whether the folder holds a tensor.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.names().any(|known| known == name)
    }

    /// Checks that the model has a place for every tensor of the folder.
    ///
    /// # Errors
    /// [`CheckpointError::UnexpectedTensors`] lists the others: an adapter for another base.
    pub fn check_all_used(&self, used: &[&str]) -> Result<(), CheckpointError> {
        let names = self.tensors.names();
        let strays = names.filter(|name| !used.contains(name));
        let tensors: Vec<String> = strays.map(str::to_owned).collect();
        if tensors.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::UnexpectedTensors {
            folder: self.path.clone(),
            tensors,
        })
    }
}

fn refused(file: &str, key: &str, expected: &'static str, found: impl ToString) -> CheckpointError {
    CheckpointError::Adapter {
        file: file.to_owned(),
        key: key.to_owned(),
        expected,
        found: found.to_string(),
    }
}

fn config_of(json: Json, file: &str) -> Result<LoraConfig, CheckpointError> {
    if json.peft_type != "LORA" {
        return Err(refused(file, "peft_type", "LORA", json.peft_type));
    }
    if json.r == 0 {
        return Err(refused(file, "r", "at least 1", json.r));
    }
    for key in OTHER_FUNCTIONS {
        let value = json.rest.get(key).unwrap_or(&Value::Null);
        let empty = match value {
            Value::Null | Value::Bool(false) => true,
            Value::Object(map) => map.is_empty(),
            Value::Array(list) => list.is_empty(),
            _ => false,
        };
        if !empty {
            return Err(refused(file, key, "null, false or empty", value));
        }
    }
    if let Some(bias) = json.rest.get("bias").filter(|b| *b != "none") {
        return Err(refused(file, "bias", "\"none\"", bias));
    }
    let norms = norms_of(json.rest.get("modules_to_save"), file)?;
    let expected = "a list of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj";
    let Value::Array(names) = &json.target_modules else {
        return Err(refused(
            file,
            "target_modules",
            expected,
            &json.target_modules,
        ));
    };
    let mut targets = Vec::new();
    for name in names {
        let found = name.as_str().and_then(Projection::of_module);
        targets.push(found.ok_or_else(|| refused(file, "target_modules", expected, name))?);
    }
    targets.sort();
    targets.dedup();
    Ok(LoraConfig {
        rank: json.r,
        alpha: json.lora_alpha,
        targets,
        norms,
        base: Base::Plain,
    })
}

/// The modules that are trained whole beside the adapters: none, or norms.
fn norms_of(modules: Option<&Value>, file: &str) -> Result<Norms, CheckpointError> {
    let list = match modules {
        None | Some(Value::Null) => return Ok(Norms::Frozen),
        Some(Value::Array(list)) if list.is_empty() => return Ok(Norms::Frozen),
        Some(Value::Array(list)) => list.as_slice(),
        Some(_) => &[],
    };
    let is_norm = |name: &Value| name.as_str().is_some_and(|name| name.ends_with(NORMS));
    match !list.is_empty() && list.iter().all(is_norm) {
        true => Ok(Norms::Trained),
        false => {
            let found = modules.unwrap_or(&Value::Null);
            let expected = "null, or a list of norms";
            Err(refused(file, "modules_to_save", expected, found))
        }
    }
}

/// Writes a folder that PEFT loads, each file replaced whole or not at all. `base` is the model's
/// name or path as it shall stand in the configuration.
///
/// # Errors
/// [`CheckpointError`]: tensors or files that cannot be written.
pub fn write_adapter_folder<'a>(
    folder: &Path,
    config: &LoraConfig,
    base: Option<&str>,
    tensors: impl IntoIterator<Item = F32Tensor<'a>>,
) -> Result<(), CheckpointError> {
    std::fs::create_dir_all(folder).map_err(|source| CheckpointError::Write {
        path: folder.display().to_string(),
        source,
    })?;
    write_f32_tensors(&folder.join(TENSORS), tensors)?;
    let modules: Vec<&str> = config.targets.iter().map(|p| p.module()).collect();
    let json = json!({
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": (config.norms == Norms::Trained).then_some([NORMS]),
        "peft_type": "LORA",
        "r": config.rank,
        "target_modules": modules,
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": false,
    });
    let text = format!("{json:#}\n");
    write_atomic(&folder.join(CONFIG), |out| out.write_all(text.as_bytes()))
}

#[cfg(test)]
#[path = "peft_tests.rs"]
mod tests;
