//! The sizes and constants of a dense decoder: Llama, Qwen2 or Qwen3.

use serde::{Deserialize, Serialize};

use crate::error::{ConfigError, Expected, Found};

/// A model family: which norms and biases its blocks have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// No biases, no head norms.
    Llama,
    /// Biases on the query, key and value projections.
    Qwen2,
    /// RMS norms over each query and key head.
    Qwen3,
}

impl Family {
    /// Every family.
    pub const ALL: [Family; 3] = [Family::Llama, Family::Qwen2, Family::Qwen3];

    /// The name in recipes, which is also Hugging Face's `model_type`.
    pub const fn name(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
        }
    }

    /// The class name in the `architectures` of a Hugging Face configuration.
    pub const fn architecture(self) -> &'static str {
        match self {
            Family::Llama => "LlamaForCausalLM",
            Family::Qwen2 => "Qwen2ForCausalLM",
            Family::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    /// Whether the query, key and value projections have biases.
    pub const fn attention_bias(self) -> bool {
        matches!(self, Family::Qwen2)
    }

    /// Whether each query and key head passes an RMS norm of its own.
    pub const fn qk_norm(self) -> bool {
        matches!(self, Family::Qwen3)
    }
}

/// The configuration of a dense decoder. Field order is the order in a recipe's canonical text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// The family.
    pub family: Family,
    /// Rows of the embedding and of the output head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Number of blocks.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Width of one head; even, since rotary pairs its halves. Need not be `d_model / n_heads`.
    pub head_dim: usize,
    /// Width of the gated MLP.
    pub d_ff: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Added to the mean square in every RMS norm.
    pub rms_norm_eps: f64,
    /// Whether the output head is the embedding matrix.
    pub tie_embeddings: bool,
    /// The longest sequence the rotary tables cover.
    pub max_seq_len: usize,
    /// Standard deviation of freshly drawn weights.
    pub init_std: f64,
}

/// The names under which a file writes the fields, for the texts of errors.
pub(crate) struct FieldNames {
    pub vocab_size: &'static str,
    pub d_model: &'static str,
    pub n_layers: &'static str,
    pub n_heads: &'static str,
    pub n_kv_heads: &'static str,
    pub head_dim: &'static str,
    pub d_ff: &'static str,
    pub rope_theta: &'static str,
    pub rms_norm_eps: &'static str,
    pub max_seq_len: &'static str,
    pub init_std: &'static str,
}

/// The names in a recipe.
pub(crate) const RECIPE_NAMES: FieldNames = FieldNames {
    vocab_size: "model.vocab_size",
    d_model: "model.d_model",
    n_layers: "model.n_layers",
    n_heads: "model.n_heads",
    n_kv_heads: "model.n_kv_heads",
    head_dim: "model.head_dim",
    d_ff: "model.d_ff",
    rope_theta: "model.rope_theta",
    rms_norm_eps: "model.rms_norm_eps",
    max_seq_len: "model.max_seq_len",
    init_std: "model.init_std",
};

/// The greatest size: any product of two sizes still fits 64 bits.
pub const SIZE_MAX: usize = i32::MAX as usize;

/// The most blocks: a larger number is a mistake that would take minutes to plan.
pub const LAYERS_MAX: usize = 1024;

impl ModelConfig {
    /// Whether the query, key and value projections have biases; the family decides.
    pub fn attention_bias(&self) -> bool {
        self.family.attention_bias()
    }

    /// Checks every field and the relations between them.
    ///
    /// # Errors
    /// [`ConfigError::Value`] names the first field that does not fit.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.validate_in("model configuration", &RECIPE_NAMES)
    }

    /// As [`ModelConfig::validate`], with the file and the names that the file uses.
    pub(crate) fn validate_in(&self, file: &str, names: &FieldNames) -> Result<(), ConfigError> {
        let fault = |key, expected, found| {
            Err(ConfigError::Value {
                file: file.to_string(),
                key,
                expected,
                found,
            })
        };
        let sizes = [
            (names.vocab_size, self.vocab_size),
            (names.d_model, self.d_model),
            (names.n_layers, self.n_layers),
            (names.n_heads, self.n_heads),
            (names.n_kv_heads, self.n_kv_heads),
            (names.head_dim, self.head_dim),
            (names.d_ff, self.d_ff),
            (names.max_seq_len, self.max_seq_len),
        ];
        for (key, value) in sizes {
            let most = match key == names.n_layers {
                true => LAYERS_MAX,
                false => SIZE_MAX,
            };
            if value == 0 || value > most {
                let expected = Expected::Integer {
                    min: 1,
                    max: most as i64,
                };
                return fault(key, expected, found_size(value));
            }
        }
        let above_zero = std::ops::Bound::Excluded(0.0);
        let numbers = [
            (names.rope_theta, self.rope_theta, above_zero),
            (names.rms_norm_eps, self.rms_norm_eps, above_zero),
            (
                names.init_std,
                self.init_std,
                std::ops::Bound::Included(0.0),
            ),
        ];
        for (key, value, low) in numbers {
            let high = std::ops::Bound::Unbounded;
            let inside = std::ops::RangeBounds::contains(&(low, high), &value);
            if !(value as f32).is_finite() || !inside {
                return fault(key, Expected::Number { low, high }, Found::Number(value));
            }
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            let expected = Expected::DivisorOf {
                key: names.n_heads,
                value: self.n_heads as u64,
            };
            return fault(names.n_kv_heads, expected, found_size(self.n_kv_heads));
        }
        if !self.head_dim.is_multiple_of(2) {
            return fault(names.head_dim, Expected::Even, found_size(self.head_dim));
        }
        Ok(())
    }
}

/// A size as an error shows it.
fn found_size(value: usize) -> Found {
    Found::Integer(i64::try_from(value).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> ModelConfig {
        ModelConfig {
            family: Family::Qwen2,
            vocab_size: 16,
            d_model: 8,
            n_layers: 1,
            n_heads: 4,
            n_kv_heads: 2,
            head_dim: 4,
            d_ff: 12,
            rope_theta: 10_000.0,
            rms_norm_eps: 1e-6,
            tie_embeddings: false,
            max_seq_len: 32,
            init_std: 0.02,
        }
    }

    fn key_of(change: impl Fn(&mut ModelConfig)) -> &'static str {
        let mut c = config();
        change(&mut c);
        match c.validate() {
            Err(ConfigError::Value { key, .. }) => key,
            other => panic!("expected a value error, found {other:?}"),
        }
    }

    #[test]
    fn each_field_is_checked() {
        assert!(config().validate().is_ok());
        assert_eq!(key_of(|c| c.vocab_size = 0), "model.vocab_size");
        assert_eq!(key_of(|c| c.d_model = usize::MAX), "model.d_model");
        assert_eq!(key_of(|c| c.n_layers = 0), "model.n_layers");
        assert_eq!(key_of(|c| c.n_heads = 0), "model.n_heads");
        assert_eq!(key_of(|c| c.n_kv_heads = 3), "model.n_kv_heads");
        assert_eq!(key_of(|c| c.n_kv_heads = 0), "model.n_kv_heads");
        assert_eq!(key_of(|c| c.head_dim = 5), "model.head_dim");
        assert_eq!(key_of(|c| c.d_ff = 0), "model.d_ff");
        assert_eq!(key_of(|c| c.rope_theta = 0.0), "model.rope_theta");
        assert_eq!(key_of(|c| c.rms_norm_eps = f64::NAN), "model.rms_norm_eps");
        assert_eq!(key_of(|c| c.max_seq_len = 0), "model.max_seq_len");
        assert_eq!(key_of(|c| c.init_std = -0.1), "model.init_std");
    }

    #[test]
    fn the_family_decides_about_biases_and_head_norms() {
        let with = |f: fn(Family) -> bool| Family::ALL.map(f);
        assert_eq!(with(Family::attention_bias), [false, true, false]);
        assert_eq!(with(Family::qk_norm), [false, false, true]);
        assert!(config().attention_bias());
    }
}
