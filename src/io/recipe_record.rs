//! The sections of a recipe that say what is recorded while it trains; none of them decides a bit.

use serde::{Deserialize, Serialize};

use super::recipe::Recipe;
use crate::error::ConfigError;

/// `[digest]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DigestSection {
    /// The root over all parameters is recorded after every so many steps; never when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every: Option<u64>,
}

impl DigestSection {
    pub(super) fn is_absent(&self) -> bool {
        self.every.is_none()
    }
}

/// `[evaluation]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvaluationSection {
    /// The data set aside is evaluated after every so many steps and after the last; never when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every: Option<u64>,
    /// At most so many batches of it, the first ones; all when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batches: Option<u64>,
}

impl EvaluationSection {
    pub(super) fn is_absent(&self) -> bool {
        *self == EvaluationSection::default()
    }
}

/// `[metrics]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MetricsSection {
    /// The gradient norm of each group of parameters is recorded after every so many steps; never when
    /// absent. Each time the gradients are copied to the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_norms_every: Option<u64>,
    /// Whether TensorBoard event files are written too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensorboard: Option<bool>,
}

impl MetricsSection {
    pub(super) fn is_absent(&self) -> bool {
        *self == MetricsSection::default()
    }
}

/// An evaluation needs data that training does not see, and a best checkpoint an evaluation.
pub(super) fn check(recipe: &Recipe, file: &str) -> Result<(), ConfigError> {
    let evaluation = &recipe.evaluation;
    let conflict = |key, beside| {
        Err(ConfigError::Conflict {
            file: file.to_string(),
            key,
            beside,
        })
    };
    match (evaluation.every, evaluation.batches) {
        (Some(_), _) if !recipe.sets_data_aside() => conflict(
            "evaluation.every",
            "data.validation = 0, which sets no data aside",
        ),
        (None, Some(_)) => conflict("evaluation.batches", "no evaluation.every"),
        (None, None) if recipe.checkpoint.keep_best == Some(true) => {
            conflict("checkpoint.keep_best", "no evaluation.every")
        }
        _ => Ok(()),
    }
}
