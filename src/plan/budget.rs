//! Recomputation within a budget: what backward computes again, chosen so that the arena takes at most so many bytes.
//!
//! For each layer every set of calls that can stand again is weighed: the bytes of activations that are then kept for
//! backward against the time of the calls, by the static rule of [`super::cost`]. Those sets that no mixture of two others
//! beats are steps, each dearer a byte than the one before. All layers' steps stand in one order, the cheapest byte
//! first and of equal ones those of the lowest layers, whose backward comes last, when little else is left. How many of
//! them are taken is searched for by planning: the arena also holds what lives only for some calls.

mod layer;

use super::build::{self, Built, Chosen};
use super::{Plan, PlanConfig, ProgramKind};
use crate::error::PlanError;
use crate::grad::recompute::Again;
use crate::grad::schedule;
use crate::model::Model;
use layer::{Layer, LayerOption};

/// Plans the step of `model` in an arena of at most so many bytes.
///
/// # Errors
/// [`PlanError::ArenaBudget`] where that is not enough with everything computed again.
pub(super) fn plan(
    model: &dyn Model,
    config: &PlanConfig,
    definition: Option<blake3::Hash>,
    budget_bytes: usize,
) -> Result<Plan, PlanError> {
    let build = |chosen: Chosen| build::plan(model, config.clone(), definition, chosen);
    let kept = build(Chosen::Layers(None))?;
    let kept_bytes = kept.plan.layout.arena_bytes();
    if kept_bytes <= budget_bytes {
        return Ok(kept.plan);
    }
    let steps = Steps::of(&kept);
    let take = |count: usize| Ok(build(Chosen::Units(&steps.first(count)))?.plan);
    let everything = take(steps.order.len())?;
    let needed_bytes = everything.layout.arena_bytes();
    if needed_bytes > budget_bytes {
        return Err(PlanError::ArenaBudget {
            budget_bytes,
            needed_bytes: needed_bytes.min(kept_bytes),
        });
    }
    steps.search(budget_bytes, (kept_bytes, everything), take)
}

/// Of so many attempts one halves what is left to search.
const GUESSES: usize = 3;

/// What can be computed again, a step after the other.
struct Steps {
    /// Of each layer what is computed again after each of its steps, from nothing on.
    layers: Vec<Vec<LayerOption>>,
    order: Vec<Step>,
}

/// The next option of a layer.
struct Step {
    layer: usize,
    /// Seconds a byte.
    price: f64,
    bytes: usize,
}

impl Steps {
    fn of(kept: &Built) -> Self {
        let plan = &kept.plan;
        let kind = match plan.config.is_split() {
            true => ProgramKind::Accumulate,
            false => ProgramKind::Step,
        };
        let (body, backward) = plan.calls(kind).split_at(kept.body);
        let held = schedule::needs(&plan.slots, backward);
        let mut known: Vec<(Layer, Vec<LayerOption>)> = Vec::new();
        let mut layers = Vec::new();
        for calls in &kept.layers {
            let layer = Layer::of(&plan.slots, (body, calls.clone()), &held);
            // Layers that are alike are weighed once.
            let options = match known.iter().find(|(other, _)| *other == layer) {
                Some((_, options)) => options.clone(),
                None => {
                    let options = layer.options();
                    known.push((layer, options.clone()));
                    options
                }
            };
            layers.push(options);
        }
        let order = order_of(&layers);
        Steps { layers, order }
    }

    /// What is computed again of each layer after so many steps.
    fn first(&self, count: usize) -> Vec<Vec<Again>> {
        let mut taken = vec![0; self.layers.len()];
        for step in &self.order[..count] {
            taken[step.layer] += 1;
        }
        let options = self.layers.iter().zip(taken);
        let options = options.map(|(options, taken)| options.get(taken));
        options
            .map(|option| option.map_or_else(Vec::new, |o| o.again.clone()))
            .collect()
    }

    /// The fewest steps that keep the budget: fewer by one are seen not to.
    fn search(
        &self,
        budget_bytes: usize,
        (kept_bytes, everything): (usize, Plan),
        take: impl Fn(usize) -> Result<Plan, PlanError>,
    ) -> Result<Plan, PlanError> {
        let (mut low, mut high, mut best) = (0, self.order.len(), everything);
        let mut guess = self.after(0, kept_bytes - budget_bytes);
        for attempt in 1.. {
            if high - low <= 1 {
                break;
            }
            // A guess goes by the bytes of the steps, which are not all that the arena holds.
            let by_halves = attempt % GUESSES == 0;
            let tried = if by_halves { (low + high) / 2 } else { guess };
            let tried = tried.clamp(low + 1, high - 1);
            let plan = take(tried)?;
            let bytes = plan.layout.arena_bytes();
            match bytes <= budget_bytes {
                true => {
                    guess = self.before(tried, budget_bytes - bytes);
                    (high, best) = (tried, plan);
                }
                false => {
                    guess = self.after(tried, bytes - budget_bytes);
                    low = tried;
                }
            }
        }
        Ok(best)
    }

    /// The steps up to the one with which those after `from` have saved so many bytes.
    fn after(&self, from: usize, bytes: usize) -> usize {
        let mut left = bytes;
        let mut count = from;
        while left > 0 && count < self.order.len() {
            left = left.saturating_sub(self.order[count].bytes);
            count += 1;
        }
        count
    }

    /// The steps without the last ones before `from` that have saved no more than so many bytes.
    fn before(&self, from: usize, bytes: usize) -> usize {
        let mut left = bytes;
        let mut count = from;
        while count > 0 && self.order[count - 1].bytes <= left {
            left -= self.order[count - 1].bytes;
            count -= 1;
        }
        count
    }
}

/// The steps of all layers, the cheapest byte first.
fn order_of(layers: &[Vec<LayerOption>]) -> Vec<Step> {
    let mut order = Vec::new();
    for (layer, options) in layers.iter().enumerate() {
        let mut price = 0.0_f64;
        for pair in options.windows(2) {
            let bytes = pair[0].kept_bytes - pair[1].kept_bytes;
            let seconds = pair[1].seconds - pair[0].seconds;
            // A layer's own steps stay in their order also where rounding would say otherwise.
            price = price.max(seconds / bytes as f64);
            order.push(Step {
                layer,
                price,
                bytes,
            });
        }
    }
    order.sort_by(|a, b| a.price.total_cmp(&b.price).then(a.layer.cmp(&b.layer)));
    order
}

#[cfg(test)]
mod tests;
