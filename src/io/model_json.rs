//! A Hugging Face `config.json`: what the engine computes is read, everything else is kept, and
//! whatever would change the computation and is not offered is refused.
//!
//! Defaults of absent keys are those of transformers 5 (`LlamaConfig`, `Qwen2Config`,
//! `Qwen3Config`).

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::mamba_json;
use crate::error::{ConfigError, Expected, Found};
use crate::model::config::{FieldNames, SIZE_MAX};
use crate::model::{AnyConfig, Family, ModelConfig};

/// The names of a configuration's fields in `config.json`.
const NAMES: FieldNames = FieldNames {
    vocab_size: "vocab_size",
    d_model: "hidden_size",
    n_layers: "num_hidden_layers",
    n_heads: "num_attention_heads",
    n_kv_heads: "num_key_value_heads",
    head_dim: "head_dim",
    d_ff: "intermediate_size",
    rope_theta: "rope_theta",
    rms_norm_eps: "rms_norm_eps",
    max_seq_len: "max_position_embeddings",
    init_std: "initializer_range",
};

/// The file's name in a model folder.
pub(super) const FILE: &str = "config.json";

/// The configuration and the keys as they stand in the file.
pub(super) type Parsed = (AnyConfig, Map<String, Value>);

/// Reads the `config.json` of a folder.
pub(super) fn read(folder: &Path) -> Result<Parsed, ConfigError> {
    let path = folder.join(FILE);
    let file = path.display().to_string();
    let bytes = std::fs::read(&path).map_err(|source| ConfigError::Read {
        path: file.clone(),
        source,
    })?;
    parse(&bytes, &file)
}

/// Reads a `config.json` from its bytes; `file` is what errors call it.
pub(super) fn parse(bytes: &[u8], file: &str) -> Result<Parsed, ConfigError> {
    let map: Map<String, Value> =
        serde_json::from_slice(bytes).map_err(|e| ConfigError::Syntax {
            file: file.to_string(),
            line: e.line(),
            column: e.column(),
            message: e.to_string(),
        })?;
    let keys = Keys { file, map: &map };
    let Some(family) = keys.family()? else {
        let config = mamba_json::config(&keys)?;
        return Ok((config.into(), map));
    };
    keys.refuse_unsupported(family)?;
    let config = keys.config(family)?;
    config.validate_in(file, &NAMES)?;
    keys.refuse_sliding_window(&config)?;
    Ok((config.into(), map))
}

/// The sizes transformers gives a family whose `config.json` leaves them out.
struct Defaults {
    vocab_size: usize,
    d_ff: usize,
    max_seq_len: usize,
    /// `None`: as many as query heads.
    n_kv_heads: Option<usize>,
    /// `None`: `hidden_size / num_attention_heads`.
    head_dim: Option<usize>,
}

const fn defaults(family: Family) -> Defaults {
    match family {
        Family::Llama => Defaults {
            vocab_size: 32_000,
            d_ff: 11_008,
            max_seq_len: 2_048,
            n_kv_heads: None,
            head_dim: None,
        },
        Family::Qwen2 => Defaults {
            vocab_size: 151_936,
            d_ff: 22_016,
            max_seq_len: 32_768,
            n_kv_heads: Some(32),
            head_dim: None,
        },
        Family::Qwen3 => Defaults {
            vocab_size: 151_936,
            d_ff: 22_016,
            max_seq_len: 32_768,
            n_kv_heads: Some(32),
            head_dim: Some(128),
        },
    }
}

/// A section about rotary positions and the full names of its keys.
struct RopeNames {
    section: &'static str,
    rope_type: &'static str,
    rope_theta: &'static str,
    partial: &'static str,
}

/// The new spelling and the old one.
const ROPE: [RopeNames; 2] = [
    RopeNames {
        section: "rope_parameters",
        rope_type: "rope_parameters.rope_type",
        rope_theta: "rope_parameters.rope_theta",
        partial: "rope_parameters.partial_rotary_factor",
    },
    RopeNames {
        section: "rope_scaling",
        rope_type: "rope_scaling.rope_type",
        rope_theta: "rope_scaling.rope_theta",
        partial: "rope_scaling.partial_rotary_factor",
    },
];

/// The keys of one file.
pub(super) struct Keys<'a> {
    pub(super) file: &'a str,
    map: &'a Map<String, Value>,
}

impl Keys<'_> {
    /// A key that is there and not null.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn fault(
        &self,
        key: &'static str,
        expected: Expected,
        value: &Value,
    ) -> ConfigError {
        ConfigError::Value {
            file: self.file.to_string(),
            key,
            expected,
            found: Found::from(value),
        }
    }

    pub(super) fn unsupported(
        &self,
        key: &'static str,
        value: &Value,
        offered: &'static str,
    ) -> ConfigError {
        ConfigError::Unsupported {
            file: self.file.to_string(),
            key,
            found: Found::from(value),
            offered,
        }
    }

    pub(super) fn size_or(&self, key: &'static str, default: usize) -> Result<usize, ConfigError> {
        let Some(value) = self.map.get(key) else {
            return Ok(default);
        };
        let size = value.as_u64().and_then(|x| usize::try_from(x).ok());
        size.ok_or_else(|| {
            let expected = Expected::Integer {
                min: 1,
                max: SIZE_MAX as i64,
            };
            self.fault(key, expected, value)
        })
    }

    fn number(&self, key: &'static str, value: &Value) -> Result<f64, ConfigError> {
        let expected = Expected::Number {
            low: std::ops::Bound::Unbounded,
            high: std::ops::Bound::Unbounded,
        };
        value
            .as_f64()
            .ok_or_else(|| self.fault(key, expected, value))
    }

    pub(super) fn number_or(&self, key: &'static str, default: f64) -> Result<f64, ConfigError> {
        match self.map.get(key) {
            Some(value) => self.number(key, value),
            None => Ok(default),
        }
    }

    /// A flag; absent and null are false, as transformers has it.
    pub(super) fn flag(&self, key: &'static str) -> Result<bool, ConfigError> {
        match self.get(key) {
            Some(value) => value
                .as_bool()
                .ok_or_else(|| self.fault(key, Expected::Flag, value)),
            None => Ok(false),
        }
    }

    /// The decoder's family; `None` for Mamba.
    fn family(&self) -> Result<Option<Family>, ConfigError> {
        let expected = Expected::OneOf(&super::recipe_keys::FAMILIES);
        let Some(value) = self.map.get("model_type") else {
            return Err(ConfigError::MissingKey {
                file: self.file.to_string(),
                key: "model_type",
                expected,
            });
        };
        if value.as_str() == Some(mamba_json::MODEL_TYPE) {
            return Ok(None);
        }
        Family::ALL
            .into_iter()
            .find(|family| value.as_str() == Some(family.name()))
            .map(Some)
            .ok_or_else(|| self.fault("model_type", expected, value))
    }

    /// Refuses what would change the computation: another activation, biases, dropout,
    /// quantised weights.
    fn refuse_unsupported(&self, family: Family) -> Result<(), ConfigError> {
        let silu = self.get("hidden_act");
        if let Some(value) = silu.filter(|v| v.as_str() != Some("silu")) {
            return Err(self.unsupported("hidden_act", value, "\"silu\" only"));
        }
        // Qwen2 has its biases whatever this key says, and transformers does not read it there.
        if family != Family::Qwen2 && self.flag("attention_bias")? {
            let offered = "attention biases in qwen2 only";
            return Err(self.unsupported("attention_bias", &Value::Bool(true), offered));
        }
        if self.flag("mlp_bias")? {
            let offered = "no biases in the MLP";
            return Err(self.unsupported("mlp_bias", &Value::Bool(true), offered));
        }
        let dropout = self.get("attention_dropout");
        if let Some(value) = dropout.filter(|v| v.as_f64() != Some(0.0)) {
            return Err(self.unsupported("attention_dropout", value, "no dropout"));
        }
        match self.get("quantization_config") {
            Some(value) if !is_nf4(value) => {
                let offered = "weights that are not quantised, or NF4 as bitsandbytes has it";
                Err(self.unsupported("quantization_config", value, offered))
            }
            _ => Ok(()),
        }
    }

    fn config(&self, family: Family) -> Result<ModelConfig, ConfigError> {
        let absent = defaults(family);
        let d_model = self.size_or(NAMES.d_model, 4_096)?;
        let n_heads = self.size_or(NAMES.n_heads, 32)?;
        // Null means "as many as query heads" in every family; only absence differs.
        let n_kv_heads = match self.map.get(NAMES.n_kv_heads) {
            Some(Value::Null) => n_heads,
            Some(_) => self.size_or(NAMES.n_kv_heads, n_heads)?,
            None => absent.n_kv_heads.unwrap_or(n_heads),
        };
        Ok(ModelConfig {
            family,
            vocab_size: self.size_or(NAMES.vocab_size, absent.vocab_size)?,
            d_model,
            n_layers: self.size_or(NAMES.n_layers, 32)?,
            n_heads,
            n_kv_heads,
            head_dim: self.head_dim(&absent, d_model, n_heads)?,
            d_ff: self.size_or(NAMES.d_ff, absent.d_ff)?,
            rope_theta: self.rope_theta()?,
            rms_norm_eps: self.number_or(NAMES.rms_norm_eps, 1e-6)?,
            tie_embeddings: self.flag("tie_word_embeddings")?,
            max_seq_len: self.size_or(NAMES.max_seq_len, absent.max_seq_len)?,
            init_std: self.number_or(NAMES.init_std, 0.02)?,
        })
    }

    /// The width of a head: stated, the family's default, or `hidden_size / num_attention_heads`.
    fn head_dim(
        &self,
        absent: &Defaults,
        d_model: usize,
        n_heads: usize,
    ) -> Result<usize, ConfigError> {
        match (self.map.get(NAMES.head_dim), absent.head_dim) {
            (Some(value), _) if !value.is_null() => self.size_or(NAMES.head_dim, 0),
            (None, Some(head_dim)) => Ok(head_dim),
            // Zero heads fail the check of sizes that follows.
            _ if n_heads == 0 => Ok(2),
            _ if d_model.is_multiple_of(n_heads) => Ok(d_model / n_heads),
            _ => {
                let expected = Expected::MultipleOf {
                    key: NAMES.n_heads,
                    value: n_heads as u64,
                };
                Err(self.fault(NAMES.d_model, expected, &Value::from(d_model)))
            }
        }
    }

    /// The base of the rotary frequencies, from either spelling; two that disagree are refused,
    /// since versions of transformers differ in which one they read.
    fn rope_theta(&self) -> Result<f64, ConfigError> {
        self.refuse_partial_rotary("partial_rotary_factor", self.get("partial_rotary_factor"))?;
        let mut theta = match self.get(NAMES.rope_theta) {
            Some(value) => Some((NAMES.rope_theta, self.number(NAMES.rope_theta, value)?)),
            None => None,
        };
        for names in &ROPE {
            let Some(value) = self.get(names.section) else {
                continue;
            };
            let Value::Object(rope) = value else {
                return Err(self.fault(names.section, Expected::Section, value));
            };
            let kind = rope.get("rope_type").or_else(|| rope.get("type"));
            if let Some(kind) = kind.filter(|k| k.as_str() != Some("default")) {
                return Err(self.unsupported(names.rope_type, kind, "\"default\" only"));
            }
            self.refuse_partial_rotary(names.partial, rope.get("partial_rotary_factor"))?;
            let Some(value) = rope.get("rope_theta") else {
                continue;
            };
            let found = self.number(names.rope_theta, value)?;
            match theta {
                Some((key, other)) if other != found => {
                    let expected = Expected::EqualTo { key, value: other };
                    return Err(self.fault(names.rope_theta, expected, value));
                }
                _ => theta = Some((names.rope_theta, found)),
            }
        }
        Ok(theta.map_or(10_000.0, |(_, value)| value))
    }

    fn refuse_partial_rotary(
        &self,
        key: &'static str,
        value: Option<&Value>,
    ) -> Result<(), ConfigError> {
        match value.filter(|v| !v.is_null() && v.as_f64() != Some(1.0)) {
            Some(value) => Err(self.unsupported(key, value, "rotary positions over whole heads")),
            None => Ok(()),
        }
    }

    /// Refuses a sliding window that some layer uses. `layer_types` decides where it stands;
    /// otherwise layers from `max_window_layers` on use the window when it is switched on.
    fn refuse_sliding_window(&self, config: &ModelConfig) -> Result<(), ConfigError> {
        if let Some(value) = self.get("layer_types") {
            let Value::Array(kinds) = value else {
                return Err(self.fault("layer_types", Expected::Section, value));
            };
            return match kinds.iter().find(|k| k.as_str() != Some("full_attention")) {
                Some(kind) => Err(self.unsupported("layer_types", kind, "\"full_attention\" only")),
                None => Ok(()),
            };
        }
        let switched_on = self.flag("use_sliding_window")?;
        let has_window = !matches!(self.map.get("sliding_window"), Some(Value::Null));
        let first = match self.get("max_window_layers") {
            Some(value) => value.as_u64().unwrap_or(0),
            None => 28,
        };
        if switched_on && has_window && config.n_layers as u64 > first {
            let offered = "full attention only";
            return Err(self.unsupported("use_sliding_window", &Value::Bool(true), offered));
        }
        Ok(())
    }
}

/// Whether a folder's weights are NF4 as bitsandbytes has it.
fn is_nf4(quantization: &Value) -> bool {
    let text = |key: &str| quantization.get(key).and_then(Value::as_str);
    text("quant_method") == Some("bitsandbytes")
        && text("bnb_4bit_quant_type") == Some("nf4")
        && quantization.get("load_in_4bit") == Some(&Value::Bool(true))
}

/// The text of a `config.json` for a model saved in f32: the given keys, with every key the
/// configuration decides set anew, in alphabetical order. Both spellings of the rotary base are
/// written, for old and new versions of transformers.
pub(super) fn write(config: &AnyConfig, extra: &Map<String, Value>) -> String {
    let mut keys: BTreeMap<String, Value> = extra.clone().into_iter().collect();
    // What is saved is not quantised.
    keys.remove("quantization_config");
    let mut keys = match config {
        AnyConfig::Decoder(config) => decoder_keys(config, keys),
        AnyConfig::Mamba(config) => mamba_json::keys(config, keys),
    };
    if let Some(dtype) = keys.get_mut("dtype") {
        *dtype = json!("float32");
    }
    // A map of text keys always has a JSON text.
    let text = serde_json::to_string_pretty(&keys).unwrap_or_default();
    text + "\n"
}

/// The given keys with those that a decoder's configuration decides.
fn decoder_keys(
    config: &ModelConfig,
    mut keys: BTreeMap<String, Value>,
) -> BTreeMap<String, Value> {
    let mut rope = match keys.remove("rope_parameters") {
        Some(Value::Object(rope)) => rope,
        _ => Map::new(),
    };
    rope.insert("rope_theta".to_string(), json!(config.rope_theta));
    rope.insert("rope_type".to_string(), json!("default"));
    let mut set = |key: &str, value: Value| keys.insert(key.to_string(), value);
    set("architectures", json!([config.family.architecture()]));
    set("model_type", json!(config.family.name()));
    set(NAMES.vocab_size, json!(config.vocab_size));
    set(NAMES.d_model, json!(config.d_model));
    set(NAMES.n_layers, json!(config.n_layers));
    set(NAMES.n_heads, json!(config.n_heads));
    set(NAMES.n_kv_heads, json!(config.n_kv_heads));
    set(NAMES.head_dim, json!(config.head_dim));
    set(NAMES.d_ff, json!(config.d_ff));
    set("hidden_act", json!("silu"));
    set(NAMES.rope_theta, json!(config.rope_theta));
    set("rope_parameters", Value::Object(rope));
    set(NAMES.rms_norm_eps, json!(config.rms_norm_eps));
    set(NAMES.max_seq_len, json!(config.max_seq_len));
    set(NAMES.init_std, json!(config.init_std));
    set("tie_word_embeddings", json!(config.tie_embeddings));
    set("torch_dtype", json!("float32"));
    if config.family != Family::Qwen2 {
        set("attention_bias", json!(false));
    }
    if config.family == Family::Llama {
        set("mlp_bias", json!(false));
    }
    // The old spelling of the rotary section says nothing that the new one does not.
    keys.remove("rope_scaling");
    keys
}

#[cfg(test)]
#[path = "model_json_tests.rs"]
mod tests;
