//! The configuration of a model of any family.

use serde::{Deserialize, Serialize};

use super::Model;
use super::config::{ModelConfig, RECIPE_NAMES};
use super::decoder::Decoder;
use super::lora::LoraConfig;
use super::mamba::{Mamba, Windows};
use super::mamba_config::{Decay, MAMBA_RECIPE_NAMES, MambaConfig};
use crate::error::ConfigError;

/// What a family's configuration is. In files it is the configuration itself; the key `family` says which.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AnyConfig {
    /// Llama, Qwen2 or Qwen3.
    Decoder(ModelConfig),
    /// Mamba of the first generation.
    Mamba(MambaConfig),
}

impl From<ModelConfig> for AnyConfig {
    fn from(config: ModelConfig) -> Self {
        AnyConfig::Decoder(config)
    }
}

impl From<MambaConfig> for AnyConfig {
    fn from(config: MambaConfig) -> Self {
        AnyConfig::Mamba(config)
    }
}

impl AnyConfig {
    /// The model.
    pub fn model(&self) -> Box<dyn Model> {
        match self {
            AnyConfig::Decoder(config) => Box::new(Decoder::new(config.clone())),
            AnyConfig::Mamba(config) => Box::new(Mamba::new(config.clone())),
        }
    }

    /// The same model over windows that go on where the one before ended; `file` is what errors name.
    ///
    /// # Errors
    /// [`ConfigError::Conflict`] for a family that has no state to carry.
    pub fn over_consecutive_windows(&self, file: &str) -> Result<Box<dyn Model>, ConfigError> {
        match self {
            AnyConfig::Mamba(config) => {
                let model = Mamba::new(config.clone());
                Ok(Box::new(model.with_windows(Windows::Carried)))
            }
            AnyConfig::Decoder(_) => Err(ConfigError::Conflict {
                file: file.to_string(),
                key: "data.windows",
                beside: "a model.family that carries no state",
            }),
        }
    }

    /// The layers and the final norm alone, without embedding, head and loss; `None` for a family that has no such form.
    pub fn backbone(&self) -> Option<Box<dyn Model>> {
        match self {
            AnyConfig::Decoder(_) => None,
            AnyConfig::Mamba(config) => Some(Box::new(Mamba::new(config.clone()).backbone_alone())),
        }
    }

    /// The model, with adapters beside its frozen weights where `lora` says so; `file` is what errors name.
    ///
    /// # Errors
    /// [`ConfigError::Conflict`] for adapters beside a family whose projections have none.
    pub fn adapted(
        &self,
        lora: Option<LoraConfig>,
        file: &str,
    ) -> Result<Box<dyn Model>, ConfigError> {
        match (self, lora) {
            (_, None) => Ok(self.model()),
            (AnyConfig::Decoder(config), Some(lora)) => {
                Ok(Box::new(Decoder::with_adapters(config.clone(), lora)))
            }
            (AnyConfig::Mamba(_), Some(_)) => Err(ConfigError::Conflict {
                file: file.to_string(),
                key: "lora.rank",
                beside: "Mamba, whose projections have no adapters",
            }),
        }
    }

    /// The same model with weight decay as `decay` says. In a decoder both rules name the same tensors.
    pub fn with_decay(self, decay: Decay) -> Self {
        match self {
            AnyConfig::Mamba(config) => AnyConfig::Mamba(MambaConfig { decay, ..config }),
            decoder => decoder,
        }
    }

    /// The family's name in recipes, which is also Hugging Face's `model_type`.
    pub fn family(&self) -> &'static str {
        match self {
            AnyConfig::Decoder(config) => config.family.name(),
            AnyConfig::Mamba(_) => "mamba",
        }
    }

    /// Rows of the embedding and of the output head.
    pub fn vocab_size(&self) -> usize {
        match self {
            AnyConfig::Decoder(config) => config.vocab_size,
            AnyConfig::Mamba(config) => config.vocab_size,
        }
    }

    /// Width of the residual stream.
    pub fn d_model(&self) -> usize {
        match self {
            AnyConfig::Decoder(config) => config.d_model,
            AnyConfig::Mamba(config) => config.d_model,
        }
    }

    /// Number of blocks.
    pub fn n_layers(&self) -> usize {
        match self {
            AnyConfig::Decoder(config) => config.n_layers,
            AnyConfig::Mamba(config) => config.n_layers,
        }
    }

    /// Whether the output head is the embedding matrix.
    pub fn tie_embeddings(&self) -> bool {
        match self {
            AnyConfig::Decoder(config) => config.tie_embeddings,
            AnyConfig::Mamba(config) => config.tie_embeddings,
        }
    }

    /// The name of the embedding matrix in files.
    pub fn embedding(&self) -> &'static str {
        match self {
            AnyConfig::Decoder(_) => super::decoder::EMBED,
            AnyConfig::Mamba(_) => super::mamba::EMBED,
        }
    }

    /// The longest sequence; `None` where every length fits.
    pub fn positions(&self) -> Option<usize> {
        match self {
            AnyConfig::Decoder(config) => Some(config.max_seq_len),
            AnyConfig::Mamba(_) => None,
        }
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`ConfigError::Value`] names the first field that does not fit.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.validate_recipe("model configuration")
    }

    /// As [`AnyConfig::validate`], with the recipe's file in errors.
    pub(crate) fn validate_recipe(&self, file: &str) -> Result<(), ConfigError> {
        match self {
            AnyConfig::Decoder(config) => config.validate_in(file, &RECIPE_NAMES),
            AnyConfig::Mamba(config) => config.validate_in(file, &MAMBA_RECIPE_NAMES),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::lora::{Base, Norms, Projection};
    use crate::model::mamba_config::MambaFamily;

    #[test]
    fn adapters_beside_a_family_without_them_are_refused() {
        let config = MambaConfig {
            family: MambaFamily::Mamba,
            vocab_size: 9,
            d_model: 40,
            n_layers: 2,
            expand: 2,
            d_state: 4,
            d_conv: 4,
            dt_rank: 3,
            rms_norm_eps: 1e-5,
            tie_embeddings: true,
            init_std: 0.02,
            decay: Decay::Reference,
        };
        let lora = LoraConfig {
            rank: 4,
            alpha: 4.0,
            targets: Projection::ALL.into(),
            norms: Norms::Frozen,
            base: Base::Plain,
        };
        let config = AnyConfig::from(config);
        assert!(config.adapted(None, "r.toml").is_ok());
        let refused = config.adapted(Some(lora), "r.toml").err();
        assert!(
            matches!(
                &refused,
                Some(ConfigError::Conflict { key: "lora.rank", file, .. }) if file == "r.toml"
            ),
            "{refused:?}"
        );
    }
}
