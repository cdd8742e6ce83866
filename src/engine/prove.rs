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
use crate::op::step_values::{Dropped, StepScalars};
use crate::plan::ProgramKind;
use crate::shape::Role;

/// The bits before a proof, and the inputs of both runs.
struct Start<'b> {
    snapshot: Snapshot,
    /// Everything that survives a step, cut at the slots, with the digests it begins with.
    pieces: Vec<(Region, blake3::Hash)>,
    inputs: (&'b Batch, StepScalars),
}

/// Compares an eager step and a replay, and an eager evaluation and its replay, and puts the arena
/// back as it was.
pub(super) fn prove_equal<B: Backend>(
    core: &mut Core<B>,
    graphs: &mut Graphs<B>,
    batch: &Batch,
    hyper: &Hyper,
) -> Result<(), CaptureError> {
    let scalars = core.validate(batch, hyper).map_err(refused)?;
    let start = Start::of(core, (batch, scalars))?;
    // The evaluation goes first: it changes no weight, so there is little to put back after it.
    let proof = compare(core, &start, &mut graphs.evaluate, ProgramKind::Evaluate)
        .and_then(|()| compare(core, &start, &mut graphs.step, ProgramKind::Step));
    start.restore(core)?;
    proof
}

fn compare<B: Backend>(
    core: &mut Core<B>,
    start: &Start,
    graph: &mut B::Graph,
    kind: ProgramKind,
) -> Result<(), CaptureError> {
    let compared = compared_slots(core);
    start.begin(core)?;
    core.eager(kind, None)?;
    let expected = core.digests(&compared)?;
    if kind == ProgramKind::Step {
        let report = core.report()?;
        if report.applied == 0 {
            let reason = format!("{:?}", Dropped::from_bits_retain(report.dropped));
            return Err(CaptureError::ProofStepDropped { reason });
        }
    }
    start.begin(core)?;
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

impl<'b> Start<'b> {
    fn of<B: Backend>(
        core: &mut Core<B>,
        inputs: (&'b Batch, StepScalars),
    ) -> Result<Self, DeviceError> {
        let regions = persistent_pieces(core);
        let snapshot = core.snapshot()?;
        let digests = core.digest_regions(&regions)?;
        Ok(Start {
            snapshot,
            pieces: regions.into_iter().zip(digests).collect(),
            inputs,
        })
    }

    /// Puts back what has other bits than before the proof. Digests tell, so that what has not changed
    /// is not copied.
    fn restore<B: Backend>(&self, core: &mut Core<B>) -> Result<(), DeviceError> {
        let regions: Vec<Region> = self.pieces.iter().map(|(region, _)| *region).collect();
        let now = core.digest_regions(&regions)?;
        for (&(region, then), now) in self.pieces.iter().zip(now) {
            if let Some(bytes) = self.snapshot.region(region).filter(|_| then != now) {
                let written = core.backend.write(&mut core.arena, region, bytes);
                core.guarded(written)?;
            }
        }
        Ok(())
    }

    /// Goes to the start of a run: the bits before the proof with the inputs of the proof, and NaN in
    /// everything that lives inside a step or is reported by one, so that a replay that skips a write
    /// is seen.
    fn begin<B: Backend>(&self, core: &mut Core<B>) -> Result<(), DeviceError> {
        // These bytes are a NaN in every float type.
        const NAN: u8 = 0xff;
        self.restore(core)?;
        core.write_inputs(self.inputs.0, self.inputs.1)?;
        let offset = core.plan.layout.persistent_bytes();
        let bytes = core.plan.layout.arena_bytes() - offset;
        let mut regions = vec![Region { offset, bytes }];
        let reports = core.plan.slots.iter();
        let reports = reports.filter(|(_, d)| d.spec.role == Role::Report);
        regions.extend(reports.map(|(slot, _)| core.plan.layout.region(slot)));
        for region in regions {
            let filled = core.backend.fill(&mut core.arena, region, NAN);
            core.guarded(filled)?;
        }
        Ok(())
    }
}

/// The part of the arena that survives a step, cut at the starts of its slots.
fn persistent_pieces<B: Backend>(core: &Core<B>) -> Vec<Region> {
    let slots = core.plan.slots.iter();
    let roots = slots.filter(|(_, d)| d.view.is_none() && d.spec.role.persistent());
    let mut ends: Vec<usize> = roots
        .map(|(slot, _)| core.plan.layout.region(slot).offset)
        .chain([0, core.plan.layout.persistent_bytes()])
        .collect();
    ends.sort_unstable();
    ends.dedup();
    let pieces = ends.windows(2);
    pieces
        .map(|pair| Region {
            offset: pair[0],
            bytes: pair[1] - pair[0],
        })
        .collect()
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

/// A batch that does not fit is the caller's mistake, told in its own words.
fn refused(error: StepError) -> CaptureError {
    match error {
        StepError::Device(fault) => CaptureError::Device(fault),
        other => CaptureError::ProofBatch {
            text: other.to_string(),
        },
    }
}
