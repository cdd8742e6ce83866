//! What a checkpoint states beside its tensors: `state.json`.

use serde::{Deserialize, Serialize};

use crate::op::step_values::LossScale;

/// The version of the folder's form.
pub const FORMAT: u32 = 1;

/// Everything but the tensors that a run needs to go on with the same bits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointState {
    /// [`FORMAT`].
    pub format: u32,
    /// The version of the numeric contract.
    pub contract: u32,
    /// The numeric domain.
    pub domain: String,
    /// Steps taken; the next step has this number.
    pub step: u64,
    /// Steps applied: AdamW's `t`.
    pub applied: u64,
    /// The seed of weights and data order.
    pub seed: u64,
    pub schedule: SchedulePosition,
    pub data: DataCursor,
    /// The loss scale, where gradients carry one; its tensor has the same values.
    pub loss_scale: Option<ScaleState>,
    /// The open accumulation window; its partial sums are among the tensors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<WindowState>,
    /// The hash of the step's manifest, in the form that defines its bits.
    pub manifest: String,
    /// The BLAKE3 of `recipe`.
    pub recipe_hash: String,
    /// The recipe's canonical text.
    pub recipe: String,
    /// Every tensor, in the order of their names; filled in by [`save`](super::save).
    pub tensors: Vec<TensorRecord>,
}

/// Where the learning rate stands.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SchedulePosition {
    /// The step whose rate comes next.
    pub step: u64,
    /// That rate.
    pub lr: f64,
}

/// Where the data stands. A batch follows from the step, the seed and the data alone, so the cursor
/// is the step; the rest tells whether the data is still the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataCursor {
    /// The first sequence of the next batch, counted over the run.
    pub sequence: u64,
    /// Sequences of an epoch; absent where data has no end.
    pub sequences_per_epoch: Option<u64>,
    /// The BLAKE3 of the next batch; absent where it cannot be made.
    pub next_batch: Option<String>,
}

/// Parts of the next batch whose gradients wait for their update.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WindowState {
    /// Grains that are computed; each binary digit that is set has a partial sum, `window.<digit>.…`.
    pub grains: u64,
    /// What the sum of losses will be divided by.
    pub normaliser: f64,
    /// Targets that were scored.
    pub scored: u64,
    /// The BLAKE3 of the whole batch.
    pub batch: String,
}

/// The loss scale.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaleState {
    pub scale: f32,
    pub good_steps: u32,
    pub skipped: u32,
}

impl From<LossScale> for ScaleState {
    fn from(of: LossScale) -> Self {
        ScaleState {
            scale: of.scale,
            good_steps: of.good_steps,
            skipped: of.skipped,
        }
    }
}

/// One tensor of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorRecord {
    pub name: String,
    /// What the engine uses it for.
    pub role: String,
    /// The BLAKE3 of its bytes.
    pub blake3: String,
}
