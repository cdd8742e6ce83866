//! The `config.json` of a Mamba model: what the engine computes is read, what would change the computation and
//! is not offered is refused.
//!
//! Defaults of absent keys are those of transformers 5 (`MambaConfig`).

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::model_json::Keys;
use crate::error::{ConfigError, Expected};
use crate::model::config::SIZE_MAX;
use crate::model::mamba_config::{Decay, MambaConfig, MambaFamily, MambaNames};

/// The `model_type`.
pub(super) const MODEL_TYPE: &str = "mamba";

/// The names of a configuration's fields in `config.json`.
const NAMES: MambaNames = MambaNames {
    vocab_size: "vocab_size",
    d_model: "hidden_size",
    n_layers: "num_hidden_layers",
    expand: "expand",
    d_state: "state_size",
    d_conv: "conv_kernel",
    dt_rank: "time_step_rank",
    rms_norm_eps: "layer_norm_epsilon",
    init_std: "initializer_range",
};

/// The checked configuration of a file.
pub(super) fn config(keys: &Keys<'_>) -> Result<MambaConfig, ConfigError> {
    refuse_unsupported(keys)?;
    let d_model = keys.size_or(NAMES.d_model, 768)?;
    let config = MambaConfig {
        family: MambaFamily::Mamba,
        vocab_size: keys.size_or(NAMES.vocab_size, 50_280)?,
        d_model,
        n_layers: keys.size_or(NAMES.n_layers, 32)?,
        expand: keys.size_or(NAMES.expand, 2)?,
        d_state: keys.size_or(NAMES.d_state, 16)?,
        d_conv: keys.size_or(NAMES.d_conv, 4)?,
        dt_rank: rank(keys, d_model)?,
        rms_norm_eps: keys.number_or(NAMES.rms_norm_eps, 1e-5)?,
        tie_embeddings: flag_or_true(keys, "tie_word_embeddings")?,
        init_std: keys.number_or(NAMES.init_std, 0.1)?,
        decay: Decay::default(),
    };
    config.validate_in(keys.file, &NAMES)?;
    Ok(config)
}

/// A flag that is true where it is absent.
fn flag_or_true(keys: &Keys<'_>, key: &'static str) -> Result<bool, ConfigError> {
    match keys.get(key) {
        Some(_) => keys.flag(key),
        None => Ok(true),
    }
}

/// The rank of the time steps; "auto" is a sixteenth of the width, rounded up.
fn rank(keys: &Keys<'_>, d_model: usize) -> Result<usize, ConfigError> {
    match keys.get(NAMES.dt_rank) {
        Some(Value::String(text)) if text == "auto" => Ok(d_model.div_ceil(16)),
        Some(value @ Value::String(_)) => {
            let expected = Expected::Integer {
                min: 1,
                max: SIZE_MAX as i64,
            };
            Err(keys.fault(NAMES.dt_rank, expected, value))
        }
        _ => keys.size_or(NAMES.dt_rank, d_model.div_ceil(16)),
    }
}

fn refuse_unsupported(keys: &Keys<'_>) -> Result<(), ConfigError> {
    let silu = keys.get("hidden_act");
    if let Some(value) = silu.filter(|v| v.as_str() != Some("silu")) {
        return Err(keys.unsupported("hidden_act", value, "\"silu\" only"));
    }
    if keys.flag("use_bias")? {
        let offered = "no biases in the input and output products";
        return Err(keys.unsupported("use_bias", &Value::Bool(true), offered));
    }
    if !flag_or_true(keys, "use_conv_bias")? {
        let offered = "a convolution with its bias";
        return Err(keys.unsupported("use_conv_bias", &Value::Bool(false), offered));
    }
    match keys.get("quantization_config") {
        Some(value) => {
            let offered = "weights that are not quantised";
            Err(keys.unsupported("quantization_config", value, offered))
        }
        None => Ok(()),
    }
}

/// The given keys with those that the configuration decides.
pub(super) fn keys(
    config: &MambaConfig,
    mut keys: BTreeMap<String, Value>,
) -> BTreeMap<String, Value> {
    let mut set = |key: &str, value: Value| keys.insert(key.to_string(), value);
    set("architectures", json!(["MambaForCausalLM"]));
    set("model_type", json!(MODEL_TYPE));
    set(NAMES.vocab_size, json!(config.vocab_size));
    set(NAMES.d_model, json!(config.d_model));
    set(NAMES.n_layers, json!(config.n_layers));
    set(NAMES.expand, json!(config.expand));
    set("intermediate_size", json!(config.d_inner()));
    set(NAMES.d_state, json!(config.d_state));
    set(NAMES.d_conv, json!(config.d_conv));
    set(NAMES.dt_rank, json!(config.dt_rank));
    set(NAMES.rms_norm_eps, json!(config.rms_norm_eps));
    set(NAMES.init_std, json!(config.init_std));
    set("hidden_act", json!("silu"));
    set("use_bias", json!(false));
    set("use_conv_bias", json!(true));
    set("tie_word_embeddings", json!(config.tie_embeddings));
    set("torch_dtype", json!("float32"));
    keys
}
