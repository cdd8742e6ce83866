//! Recomputation within a budget: what backward computes again, chosen so that the arena takes at most so many bytes.
//!
//! For each layer every set of calls that can stand again is weighed: the bytes of activations that are then kept for
//! backward against the time of the calls, by the static rule of [`super::cost`]. Those sets that no mixture of two others
//! beats are steps, each dearer a byte than the one before. All layers' steps stand in one order, the cheapest byte
//! first and of equal ones those of the lowest layers, whose backward comes last, when little else is left. How many of
//! them are taken is searched for by planning: the arena also holds what lives only for some calls. Among the steps is
//! also that a head whose weight is frozen runs in smaller chunks, so that fewer logits exist at once.

mod layer;

use super::build::{self, Built, Chosen};
use super::{Plan, PlanConfig, ProgramKind, cost};
use crate::error::PlanError;
use crate::grad::recompute::Again;
use crate::grad::schedule::{self, Written};
use crate::model::Model;
use crate::op::Op;
use crate::op::matmul::{Matmul, MatmulGradInput};
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
    let build = |config: PlanConfig, chosen: Chosen| build::plan(model, config, definition, chosen);
    let kept = build(config.clone(), Chosen::Layers(None))?;
    let kept_bytes = kept.plan.layout.arena_bytes();
    if kept_bytes <= budget_bytes {
        return Ok(kept.plan);
    }
    let steps = Steps::of(&kept);
    let take = |count: usize| {
        let (layers, chunk_logits) = steps.first(count);
        let config = PlanConfig {
            chunk_logits: chunk_logits.unwrap_or(config.chunk_logits),
            ..config.clone()
        };
        Ok(build(config, Chosen::Units(&layers))?.plan)
    };
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

/// What saves memory, a step after the other.
struct Steps {
    /// Of each layer what is computed again after each of its steps, from nothing on.
    layers: Vec<Vec<LayerOption>>,
    /// The most logits at once after each step of the head.
    chunks: Vec<usize>,
    order: Vec<Step>,
}

/// The next option of a layer, or smaller chunks of the head.
struct Step {
    place: Place,
    /// Seconds a byte.
    price: f64,
    bytes: usize,
}

/// Where a step saves memory. Of equal prices the lowest layer's comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Layer(usize),
    Head,
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
        let written = Written::by(&plan.slots, body);
        let ends =
            [kept.layers.first(), kept.layers.last()].map(|l| l.cloned().unwrap_or_default());
        let all = ends[0].start..ends[1].end;
        let mut known: Vec<(Layer, Vec<LayerOption>)> = Vec::new();
        let mut layers = Vec::new();
        for calls in &kept.layers {
            let layer = Layer::of((&plan.slots, &written), (body, &all, calls), &held);
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
        let (chunks, halvings) = halvings(kept);
        let mut order = order_of(&layers);
        order.extend(halvings);
        order.sort_by(|a, b| a.price.total_cmp(&b.price).then(a.place.cmp(&b.place)));
        Steps {
            layers,
            chunks,
            order,
        }
    }

    /// After so many steps what is computed again of each layer, and the most logits at once where they are fewer.
    fn first(&self, count: usize) -> (Vec<Vec<Again>>, Option<usize>) {
        let mut taken = vec![0; self.layers.len()];
        let mut chunks = self.chunks.iter();
        let mut chunk_logits = None;
        for step in &self.order[..count] {
            match step.place {
                Place::Layer(layer) => taken[layer] += 1,
                Place::Head => chunk_logits = chunks.next().copied(),
            }
        }
        let options = self.layers.iter().zip(taken);
        let options = options.map(|(options, taken)| options.get(taken));
        let again = options.map(|option| option.map_or_else(Vec::new, |o| o.again.clone()));
        (again.collect(), chunk_logits)
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
                place: Place::Layer(layer),
                price,
                bytes,
            });
        }
    }
    order
}

/// Rows of the smallest chunks that a head is cut into for a budget.
const LEAST_ROWS: usize = 512;
/// The most chunks: a plan of more calls takes minutes.
const MOST_CHUNKS: usize = 4096;

/// The steps of a head whose weight is not trained, of whose chunks no bit depends: the most logits at once after each,
/// half as many as before it.
fn halvings(kept: &Built) -> (Vec<usize>, Vec<Step>) {
    let plan = &kept.plan;
    let (mut chunks, mut steps) = (Vec::new(), Vec::new());
    let (Some(head), Some((logits, _))) = (kept.frozen_head, plan.logits.first()) else {
        return (chunks, steps);
    };
    let (vocab_size, math) = (head.vocab_size, plan.config.math);
    let mut rows = plan.slots.spec(*logits).shape.elements() / vocab_size.max(1);
    let mut price = 0.0_f64;
    while rows >= 2 * LEAST_ROWS {
        let times = plan.inputs.rows().div_ceil(rows);
        if 2 * times > MOST_CHUNKS {
            break;
        }
        let seconds = |rows| {
            let (n_in, n_out) = (head.d_model, vocab_size);
            let ops = [
                Op::from(Matmul {
                    rows,
                    n_in,
                    n_out,
                    bias: false,
                    math,
                }),
                Op::from(MatmulGradInput {
                    rows,
                    n_in,
                    n_out,
                    math,
                }),
            ];
            ops.iter().map(cost::seconds).sum::<f64>()
        };
        let half = rows / 2;
        let bytes = (rows - half) * vocab_size * math.storage().size();
        let more = (2.0 * seconds(half) - seconds(rows)).max(0.0);
        price = price.max(times as f64 * more / bytes as f64);
        steps.push(Step {
            place: Place::Head,
            price,
            bytes,
        });
        chunks.push(half * vocab_size);
        rows = half;
    }
    (chunks, steps)
}

#[cfg(test)]
mod tests;
