//! The hyperparameters of a step and the scalars they give.

use crate::error::StepError;
use crate::op::step_values::StepScalars;

/// What the optimizer does at a step. `beta1`, `beta2` and `eps` are baked into the program; the
/// others may change from step to step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    /// The global norm gradients are clipped to; `None` for no clipping.
    pub clip_norm: Option<f64>,
    /// A step with a larger norm is dropped whole; `None` for no limit.
    pub spike_norm: Option<f64>,
}

impl Default for Hyper {
    fn default() -> Self {
        Hyper {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            clip_norm: Some(1.0),
            spike_norm: None,
        }
    }
}

impl Hyper {
    /// The scalars of AdamW's step `t` (from 1) with `normaliser` over the loss.
    ///
    /// Every value is computed in f64 and rounded once.
    ///
    /// # Errors
    /// A value that is negative, not finite, or a normaliser that is not positive.
    pub fn scalars(&self, t: u64, normaliser: f64) -> Result<StepScalars, StepError> {
        let limits = [
            ("lr", self.lr),
            ("weight_decay", self.weight_decay),
            ("clip_norm", self.clip_norm.unwrap_or(0.0)),
            ("spike_norm", self.spike_norm.unwrap_or(0.0)),
        ];
        for (name, found) in limits {
            if !(found.is_finite() && found >= 0.0) {
                let expected = "a finite number of at least 0";
                return Err(StepError::Hyperparameter {
                    name,
                    expected,
                    found,
                });
            }
        }
        if !(normaliser.is_finite() && normaliser > 0.0) {
            return Err(StepError::Hyperparameter {
                name: "loss normaliser",
                expected: "a finite number above 0 (a batch with at least one scored target)",
                found: normaliser,
            });
        }
        let correction = |beta: f64| (1.0 / (1.0 - libm::pow(beta, t as f64))) as f32;
        let limit = |limit: Option<f64>| limit.map_or(f32::INFINITY, |x| x as f32);
        Ok(StepScalars {
            lr: self.lr as f32,
            bias_correction1: correction(self.beta1),
            bias_correction2: correction(self.beta2),
            decay: (1.0 - self.lr * self.weight_decay) as f32,
            max_norm: limit(self.clip_norm),
            spike_norm: limit(self.spike_norm),
            inv_normaliser: (1.0 / normaliser) as f32,
            loss_scale: 1.0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bias_correction_is_that_of_the_step() {
        let hyper = Hyper::default();
        let at = |t| hyper.scalars(t, 1.0).unwrap().bias_correction1;
        assert_eq!(at(1), (1.0 / (1.0 - 0.9f64)) as f32);
        assert_eq!(at(2), (1.0f64 / (1.0 - 0.9 * 0.9)) as f32);
        assert!(at(1000) == 1.0);
    }

    #[test]
    fn numbers_that_cannot_train_are_refused_by_name() {
        let negative = Hyper {
            lr: -1.0,
            ..Hyper::default()
        };
        let nan = Hyper {
            weight_decay: f64::NAN,
            ..Hyper::default()
        };
        for (hyper, name) in [(negative, "lr"), (nan, "weight_decay")] {
            let text = hyper.scalars(1, 1.0).unwrap_err().to_string();
            assert!(text.starts_with(name), "{text}");
        }
        let empty = Hyper::default().scalars(1, 0.0).unwrap_err().to_string();
        assert!(empty.contains("at least one scored target"), "{empty}");
    }
}
