//! The sizes and constants of a Mamba model of the first generation.

use serde::{Deserialize, Serialize};

use super::config::{LAYERS_MAX, SIZE_MAX};
use crate::error::{ConfigError, Expected, Found};

/// The family's name in recipes, which is also Hugging Face's `model_type`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MambaFamily {
    /// Selective state spaces of the first generation.
    #[default]
    Mamba,
}

/// To which tensors weight decay applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// To those of two or more dimensions but not to `A_log`, as the reference implementation marks them.
    #[default]
    Reference,
    /// To all of two or more dimensions.
    Matrices,
}

/// The configuration of a Mamba model. Field order is the order in a recipe's canonical text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MambaConfig {
    /// The family.
    pub family: MambaFamily,
    /// Rows of the embedding and of the output head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Number of blocks.
    pub n_layers: usize,
    /// Channels of a block's scan for each column of the stream; 2 in the published models.
    pub expand: usize,
    /// States of a channel, 1 to 64.
    pub d_state: usize,
    /// Positions that the convolution reads, 2 to 16.
    pub d_conv: usize,
    /// Rank of the projection that gives the time steps.
    pub dt_rank: usize,
    /// Added to the mean square in every RMS norm.
    pub rms_norm_eps: f64,
    /// Whether the output head is the embedding matrix.
    pub tie_embeddings: bool,
    /// Standard deviation of freshly drawn weights.
    pub init_std: f64,
    /// To which tensors weight decay applies; the optimizer's, so no part of a file about the model.
    #[serde(skip)]
    pub decay: Decay,
}

/// The most channels for each column of the stream.
pub const EXPAND_MAX: usize = 64;
/// The most states of a channel.
pub const D_STATE_MAX: usize = 64;
/// The most positions that the convolution reads.
pub const D_CONV_MAX: usize = 16;

/// The names under which a file writes the fields, for the texts of errors.
pub(crate) struct MambaNames {
    pub vocab_size: &'static str,
    pub d_model: &'static str,
    pub n_layers: &'static str,
    pub expand: &'static str,
    pub d_state: &'static str,
    pub d_conv: &'static str,
    pub dt_rank: &'static str,
    pub rms_norm_eps: &'static str,
    pub init_std: &'static str,
}

/// The names in a recipe.
pub(crate) const MAMBA_RECIPE_NAMES: MambaNames = MambaNames {
    vocab_size: "model.vocab_size",
    d_model: "model.d_model",
    n_layers: "model.n_layers",
    expand: "model.expand",
    d_state: "model.d_state",
    d_conv: "model.d_conv",
    dt_rank: "model.dt_rank",
    rms_norm_eps: "model.rms_norm_eps",
    init_std: "model.init_std",
};

impl MambaConfig {
    /// Channels of a block's scan.
    pub fn d_inner(&self) -> usize {
        self.expand.saturating_mul(self.d_model)
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`ConfigError::Value`] names the first field that does not fit.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.validate_in("model configuration", &MAMBA_RECIPE_NAMES)
    }

    /// As [`MambaConfig::validate`], with the file and the names that the file uses.
    pub(crate) fn validate_in(&self, file: &str, names: &MambaNames) -> Result<(), ConfigError> {
        let fault = |key, expected, found| {
            Err(ConfigError::Value {
                file: file.to_string(),
                key,
                expected,
                found,
            })
        };
        let sizes = [
            (names.vocab_size, self.vocab_size, 1..=SIZE_MAX),
            (names.d_model, self.d_model, 1..=SIZE_MAX),
            (names.n_layers, self.n_layers, 1..=LAYERS_MAX),
            (names.expand, self.expand, 1..=EXPAND_MAX),
            (names.d_state, self.d_state, 1..=D_STATE_MAX),
            (names.d_conv, self.d_conv, 2..=D_CONV_MAX),
            (names.dt_rank, self.dt_rank, 1..=SIZE_MAX),
        ];
        for (key, value, range) in sizes {
            if !range.contains(&value) {
                let expected = Expected::Integer {
                    min: *range.start() as i64,
                    max: *range.end() as i64,
                };
                let found = Found::Integer(i64::try_from(value).unwrap_or(i64::MAX));
                return fault(key, expected, found);
            }
        }
        use std::ops::Bound::{Excluded, Included, Unbounded};
        let numbers = [
            (names.rms_norm_eps, self.rms_norm_eps, Excluded(0.0)),
            (names.init_std, self.init_std, Included(0.0)),
        ];
        for (key, value, low) in numbers {
            let high = Unbounded;
            let inside = std::ops::RangeBounds::contains(&(low, high), &value);
            if !(value as f32).is_finite() || !inside {
                return fault(key, Expected::Number { low, high }, Found::Number(value));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key_of(change: impl Fn(&mut MambaConfig)) -> Option<&'static str> {
        let mut config = MambaConfig {
            family: MambaFamily::Mamba,
            vocab_size: 16,
            d_model: 8,
            n_layers: 1,
            expand: 2,
            d_state: 4,
            d_conv: 4,
            dt_rank: 1,
            rms_norm_eps: 1e-5,
            tie_embeddings: true,
            init_std: 0.1,
            decay: Decay::Reference,
        };
        change(&mut config);
        match config.validate() {
            Ok(()) => None,
            Err(ConfigError::Value { key, .. }) => Some(key),
            Err(other) => panic!("expected a value error, found {other:?}"),
        }
    }

    #[test]
    fn each_field_is_checked() {
        assert_eq!(key_of(|_| {}), None);
        assert_eq!(key_of(|c| c.vocab_size = 0), Some("model.vocab_size"));
        assert_eq!(key_of(|c| c.d_model = usize::MAX), Some("model.d_model"));
        assert_eq!(key_of(|c| c.n_layers = 0), Some("model.n_layers"));
        assert_eq!(key_of(|c| c.expand = 0), Some("model.expand"));
        assert_eq!(key_of(|c| c.d_state = 65), Some("model.d_state"));
        assert_eq!(key_of(|c| c.d_conv = 1), Some("model.d_conv"));
        assert_eq!(key_of(|c| c.dt_rank = 0), Some("model.dt_rank"));
        assert_eq!(key_of(|c| c.rms_norm_eps = 0.0), Some("model.rms_norm_eps"));
        assert_eq!(key_of(|c| c.init_std = f64::NAN), Some("model.init_std"));
    }
}
