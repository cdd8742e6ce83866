//! Runs a recipe and writes down its bits.

use std::sync::Arc;

use super::file::{GoldenFile, OpLine, StepLine, TensorLine};
use crate::backend::Backend;
use crate::engine::run::Run;
use crate::engine::session::Session;
use crate::engine::snapshot::Snapshot;
use crate::engine::step::Observe;
use crate::error::{DeviceError, Error, GoldenError, StepError};
use crate::layout::PlacedCall;
use crate::op::Access;
use crate::plan::Plan;

/// Snapshots are kept while they are at most this large.
const LARGEST_SNAPSHOT: usize = 1 << 30;

/// A disturbance of a run before one of its steps; shows that a check can fail.
pub type Disturb<'a, B> = &'a mut dyn FnMut(u64, &mut Session<B>) -> Result<(), StepError>;

/// What a run gave, and where it left the golden it was held against.
pub struct Recorded {
    pub golden: GoldenFile,
    /// The states around the first step whose line differs from the golden's.
    pub departure: Option<Departure>,
}

/// The states before and after the first step that differs.
pub struct Departure {
    pub step: u64,
    pub before: Snapshot,
    pub after: Snapshot,
}

/// Runs the recipe's golden steps on an opened run.
///
/// # Errors
/// More traced steps than eager ones; whatever stops a run.
pub fn record<B: Backend>(
    run: &mut Run<B>,
    against: Option<&GoldenFile>,
    mut disturb: Option<Disturb<B>>,
) -> Result<Recorded, Error> {
    let settings = run.recipe.golden.clone();
    let warmup_steps = u64::from(run.recipe.warmup_steps);
    if settings.trace_steps > warmup_steps {
        let (expected, found) = (warmup_steps, settings.trace_steps);
        return Err(GoldenError::TraceTooLong { expected, found }.into());
    }
    let session = run.trainer.session();
    let plan = session.plan().clone();
    let manifest = plan.definition().to_hex().to_string();
    let recipe = run.recipe.defining().hash()?;
    let mut golden = GoldenFile::empty(plan.config.math.domain(), recipe, manifest);
    let mut departure = None;
    let keep = against.is_some() && plan.layout.persistent_bytes() <= LARGEST_SNAPSHOT;
    for step in 0..settings.steps {
        if let Some(disturb) = disturb.as_deref_mut() {
            disturb(step, run.trainer.session_mut()).map_err(Error::Step)?;
        }
        let watching = keep && departure.is_none();
        let before = match watching {
            true => Some(run.trainer.session_mut().snapshot()?),
            false => None,
        };
        let mut trace = Trace {
            plan: plan.clone(),
            step,
            lines: Vec::new(),
        };
        // A step in another form has other calls; its bits show in losses, norms, roots and tensors.
        let traced = step < settings.trace_steps && plan.config.form.is_defining();
        let report = run.step(traced.then_some(&mut trace as &mut dyn Observe<B>))?;
        golden.ops.append(&mut trace.lines);
        let root = run.trainer.session_mut().root()?;
        golden.steps.push(StepLine::of(&report, root));
        let expected = against.and_then(|g| g.steps.get(step as usize));
        if let (Some(before), Some(expected)) = (before, expected)
            && golden.steps.last() != Some(expected)
        {
            let after = run.trainer.session_mut().snapshot()?;
            departure = Some(Departure {
                step,
                before,
                after,
            });
        }
    }
    golden.tensors = tensors(run.trainer.session_mut(), &plan)?;
    Ok(Recorded { golden, departure })
}

/// The parameters and moments, with their digests.
fn tensors<B: Backend>(
    session: &mut Session<B>,
    plan: &Plan,
) -> Result<Vec<TensorLine>, DeviceError> {
    let mut slots = Vec::new();
    for param in &plan.params {
        slots.push((param.name.clone(), param.slot));
        if let Some(state) = param.state {
            slots.push((format!("moment1.{}", param.name), state.moment1));
            slots.push((format!("moment2.{}", param.name), state.moment2));
        }
    }
    let digests = session.digests(&slots.iter().map(|(_, s)| *s).collect::<Vec<_>>())?;
    let lines = slots.into_iter().zip(digests);
    Ok(lines
        .map(|((name, _), digest)| TensorLine { name, digest })
        .collect())
}

/// Digests every output of every op of one step.
pub(super) struct Trace {
    pub plan: Arc<Plan>,
    pub step: u64,
    pub lines: Vec<OpLine>,
}

impl<B: Backend> Observe<B> for Trace {
    fn after(
        &mut self,
        index: usize,
        call: &PlacedCall,
        (backend, arena): (&B, &B::Arena),
    ) -> Result<(), DeviceError> {
        let rule = call.call.op.rule();
        let operands = rule.signature().writes;
        for ((operand, &slot), &region) in operands.iter().zip(&call.call.writes).zip(&call.writes)
        {
            // What the next call completes has no bits of its own yet.
            if operand.access == Access::Partial {
                continue;
            }
            for digest in backend.digest(arena, &[region])? {
                self.lines.push(OpLine {
                    step: self.step,
                    call: index,
                    stem: rule.stem().to_owned(),
                    tensor: self.plan.slots.spec(slot).name.clone(),
                    digest,
                });
            }
        }
        Ok(())
    }
}
