//! The open accumulation window in a checkpoint.
//!
//! A partial sum stands there under the binary digit of the number of grains it covers, so it means the same
//! whatever the size of the passes that made it. A run goes on with it where its own passes end there too; otherwise
//! it begins the step's passes anew, which gives the same bits, as no weight has moved.

use super::window::Window;
use crate::io::checkpoint::WindowState;
use crate::op::Slot;
use crate::plan::Plan;

/// What stands before the names of partial sums.
const PREFIX: &str = "window.";

/// What a checkpoint states of a window; `None` where its passes are no parts of one batch.
pub(super) fn stated(plan: &Plan, window: &Window) -> Option<WindowState> {
    Some(WindowState {
        grains: window.passes * plan.config.pass_grains() as u64,
        normaliser: window.normaliser,
        scored: window.scored as u64,
        batch: window.batch?.to_string(),
    })
}

/// The window that this plan goes on with after what a checkpoint states; `None` where a pass of the plan does not
/// end there.
pub(super) fn resumed(plan: &Plan, state: &WindowState) -> Option<Window> {
    let grains = plan.config.pass_grains().max(1) as u64;
    let (passes, all) = (state.grains / grains, plan.config.passes() as u64);
    let fits = plan.config.is_split() && state.grains.is_multiple_of(grains);
    (fits && 0 < passes && passes < all).then_some(Window {
        passes,
        normaliser: state.normaliser,
        scored: state.scored as usize,
        batch: Some(blake3::Hash::from_hex(&state.batch).ok()?),
    })
}

/// The partial sums of a window with their names in a checkpoint.
pub(super) fn tensors(plan: &Plan, window: &Window) -> Vec<(String, Slot)> {
    let Some(slots) = &plan.window else {
        return Vec::new();
    };
    let first = plan.config.pass_grains().max(1).trailing_zeros() as usize;
    let held = (0..slots.levels.len()).filter(|level| window.passes >> level & 1 == 1);
    held.flat_map(|level| {
        let digit = level + first;
        let tensors = slots.level_tensors(level).into_iter();
        tensors.map(move |(what, slot)| (format!("{PREFIX}{digit}.{what}"), slot))
    })
    .collect()
}

/// Whether a tensor of a checkpoint may be left aside: a partial sum of a window that is begun anew.
pub(super) fn may_be_left(state: Option<&WindowState>, name: &str) -> bool {
    state.is_some() && name.starts_with(PREFIX)
}
