//! The proof of a captured graph: from the same bits, a replay must give the bits of the eager step.

use super::hyper::Hyper;
use super::snapshot::Snapshot;
use super::state::Graphs;
use super::step::Core;
use crate::backend::Backend;
use crate::data::Batch;
use crate::error::{CaptureError, DeviceError, StepError};
use crate::layout::Region;
use crate::op::Slot;
use crate::op::step_values::Dropped;
use crate::plan::ProgramKind;

/// Compares an eager step and a replay, and an eager evaluation and its replay, and puts the arena
/// back as it was.
pub(super) fn prove_equal<B: Backend>(
    core: &mut Core<B>,
    graphs: &mut Graphs<B>,
    batch: &Batch,
    hyper: &Hyper,
) -> Result<(), CaptureError> {
    let scalars = core.validate(batch, hyper).map_err(refused)?;
    let snapshot = core.snapshot()?;
    let proof = (|| {
        core.write_inputs(batch, scalars)?;
        // The start of both runs: the bits before the proof, with the batch of the proof.
        let start = core.snapshot()?;
        compare(core, &start, &mut graphs.step, ProgramKind::Step)?;
        compare(core, &start, &mut graphs.evaluate, ProgramKind::Evaluate)
    })();
    let restored = snapshot.restore(&core.backend, &mut core.arena, &core.plan.layout);
    core.guarded(restored)?;
    proof
}

fn compare<B: Backend>(
    core: &mut Core<B>,
    start: &Snapshot,
    graph: &mut B::Graph,
    kind: ProgramKind,
) -> Result<(), CaptureError> {
    let compared = compared_slots(core);
    begin(core, start)?;
    core.eager(kind, None)?;
    let expected = core.digests(&compared)?;
    if kind == ProgramKind::Step {
        let report = core.report()?;
        if report.applied == 0 {
            let reason = format!("{:?}", Dropped::from_bits_retain(report.dropped));
            return Err(CaptureError::ProofStepDropped { reason });
        }
    }
    begin(core, start)?;
    let launched = core.backend.launch_graph(&mut core.arena, graph);
    core.guarded(launched)?;
    let found = core.digests(&compared)?;
    let differs = expected.iter().zip(&found).position(|(a, b)| a != b);
    match differs {
        None => Ok(()),
        Some(index) => Err(CaptureError::NotEqual {
            tensor: core.plan.slots.spec(compared[index]).name.clone(),
            expected: expected[index].to_hex().to_string(),
            found: found[index].to_hex().to_string(),
        }),
    }
}

/// Goes to the start of a run, with everything that lives inside a step full of NaN.
fn begin<B: Backend>(core: &mut Core<B>, start: &Snapshot) -> Result<(), DeviceError> {
    let restored = start.restore(&core.backend, &mut core.arena, &core.plan.layout);
    core.guarded(restored)?;
    poison_step_local(core)
}

/// Everything a step leaves behind: weights and their shadow, gradients, moments, the loss scale and
/// what it reports.
fn compared_slots<B: Backend>(core: &Core<B>) -> Vec<Slot> {
    let outputs = core.plan.outputs;
    let mut slots: Vec<Slot> = core.plan.params.iter().map(|p| p.slot).collect();
    let states = core.plan.params.iter().filter_map(|p| p.state);
    slots.extend(states.flat_map(|s| [s.grad, s.moment1, s.moment2]));
    // Frozen parameters never change, so neither do their shadows.
    slots.extend(core.plan.arenas.shadow);
    slots.extend(core.plan.inputs.loss_scale);
    slots.extend([
        outputs.loss,
        outputs.row_loss,
        outputs.row_hit,
        outputs.report,
    ]);
    slots
}

/// Fills what only lives inside a step with NaN, so that a replay that skips a write is seen.
fn poison_step_local<B: Backend>(core: &mut Core<B>) -> Result<(), DeviceError> {
    const CHUNK: usize = 1 << 22;
    let nan = f32::NAN.to_le_bytes().repeat(CHUNK / 4);
    let end = core.plan.layout.arena_bytes();
    let mut offset = core.plan.layout.persistent_bytes();
    while offset < end {
        let bytes = CHUNK.min(end - offset);
        let written = core
            .backend
            .write(&mut core.arena, Region { offset, bytes }, &nan[..bytes]);
        core.guarded(written)?;
        offset += bytes;
    }
    Ok(())
}

/// A batch that does not fit is the caller's mistake, told in its own words.
fn refused(error: StepError) -> CaptureError {
    match error {
        StepError::Device(fault) => CaptureError::Device(fault),
        other => CaptureError::ProofBatch {
            text: other.to_string(),
        },
    }
}
