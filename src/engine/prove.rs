//! The proof of a captured graph: from the same bits, a replay must give the bits of the eager step.

use std::collections::BTreeSet;

use super::hyper::Hyper;
use super::programs::Graphs;
use super::snapshot::Snapshot;
use super::step::Core;
use crate::backend::Backend;
use crate::data::Batch;
use crate::error::{CaptureError, DeviceError, StepError};
use crate::layout::Region;
use crate::op::Slot;
use crate::op::step_values::{Dropped, StepScalars};
use crate::plan::{Plan, ProgramKind};
use crate::shape::Role;

/// The bits before a proof, and the inputs of both runs.
struct Start<'b> {
    snapshot: Snapshot,
    /// Everything that survives a step, cut at the slots, with the digests it begins with.
    pieces: Vec<(Region, blake3::Hash)>,
    inputs: (&'b Batch, StepScalars),
}

/// Compares an eager run of every program with its replay, and puts the arena back as it was.
pub(super) fn prove_equal<B: Backend>(
    core: &mut Core<B>,
    graphs: &mut Graphs<B>,
    batch: &Batch,
    hyper: &Hyper,
) -> Result<(), CaptureError> {
    let part = core.first_pass(batch).map_err(refused)?;
    let scalars = core.validate(&part, hyper).map_err(refused)?;
    let start = Start::of(core, (&part, scalars))?;
    // The step goes last: the others change no weight, so there is little to put back after them.
    let (mut others, mut updates) = (Vec::new(), Vec::new());
    for (kind, graph) in graphs.iter_mut() {
        match kind {
            ProgramKind::Step | ProgramKind::Apply => updates.push((kind, graph)),
            _ => others.push((kind, graph)),
        }
    }
    let mut all = others.into_iter().chain(updates);
    let proof = all.try_for_each(|(kind, graph)| compare(core, &start, graph, kind));
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
    start.begin(core, kind)?;
    core.eager(kind, None)?;
    // A program that warm-up has not run chooses its kernels here, and its graph is captured again with them.
    if core.backend.check_graph(&core.arena, graph).is_err() {
        let calls = core.calls(kind).to_vec();
        *graph = core.backend.capture(&mut core.arena, &calls)?;
    }
    let expected = core.digests(&compared)?;
    if matches!(kind, ProgramKind::Step | ProgramKind::Apply) {
        let report = core.report()?;
        if report.applied == 0 {
            let reason = format!("{:?}", Dropped::from_bits_retain(report.dropped));
            return Err(CaptureError::ProofStepDropped { reason });
        }
    }
    start.begin(core, kind)?;
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

/// The programs that bring the arena to where a program starts from.
fn before(kind: ProgramKind, plan: &Plan) -> Vec<ProgramKind> {
    let has = |kind: &ProgramKind| !plan.calls(*kind).is_empty();
    let pass = [
        ProgramKind::Accumulate,
        ProgramKind::Forward,
        ProgramKind::Score,
        ProgramKind::Backward,
    ];
    let pass = pass.into_iter().filter(has);
    match kind {
        ProgramKind::Score | ProgramKind::Backward => pass.take_while(|k| *k != kind).collect(),
        ProgramKind::Apply => pass.collect(),
        _ => Vec::new(),
    }
}

/// What a program takes in or replaces and no other step-local tensor shows: filled before it runs, so that a
/// replay that does nothing is seen.
fn filled(kind: ProgramKind, plan: &Plan) -> Vec<(Slot, u8)> {
    // Bytes of NaN, and of two small floats that differ.
    const NAN: u8 = 0xff;
    const SMALL: [u8; 2] = [0x3d, 0x3c];
    let Some(window) = &plan.window else {
        return Vec::new();
    };
    let mut now = vec![plan.arenas.grad, window.loss];
    now.extend(window.seconds.iter().map(|(_, second)| *second));
    let held = |level: u8| window.level_tensors(usize::from(level)).into_iter();
    match kind {
        ProgramKind::Accumulate | ProgramKind::Backward => {
            now.into_iter().map(|slot| (slot, NAN)).collect()
        }
        ProgramKind::Score => vec![(window.loss, NAN)],
        ProgramKind::Merge(level) | ProgramKind::Keep(level) => {
            let now = now.into_iter().map(|slot| (slot, SMALL[0]));
            now.chain(held(level).map(|(_, slot)| (slot, SMALL[1])))
                .collect()
        }
        _ => Vec::new(),
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
    fn begin<B: Backend>(&self, core: &mut Core<B>, kind: ProgramKind) -> Result<(), DeviceError> {
        // These bytes are a NaN in every float type.
        const NAN: u8 = 0xff;
        self.restore(core)?;
        core.write_inputs(self.inputs.0, self.inputs.1)?;
        let offset = core.plan.layout.persistent_bytes();
        let bytes = core.plan.layout.arena_bytes() - offset;
        let mut regions = vec![Region { offset, bytes }];
        // A report that these programs do not write, such as the loss of a backbone, stays as it is.
        let plan = core.plan.clone();
        let slots = &plan.slots;
        let mut programs = before(kind, &plan);
        programs.push(kind);
        let calls = programs.iter().flat_map(|&k| plan.calls(k));
        let written: BTreeSet<Slot> = calls
            .flat_map(|c| &c.writes)
            .map(|&s| slots.root(s).0)
            .collect();
        let reports = slots
            .iter()
            .filter(|(slot, d)| d.spec.role == Role::Report && written.contains(slot));
        regions.extend(reports.map(|(slot, _)| core.plan.layout.region(slot)));
        let filled = filled(kind, &core.plan).into_iter();
        let filled = filled.map(|(slot, byte)| (core.plan.layout.region(slot), byte));
        let all = regions.into_iter().map(|region| (region, NAN));
        for (region, byte) in all.chain(filled.collect::<Vec<_>>()) {
            let filled = core.backend.fill(&mut core.arena, region, byte);
            core.guarded(filled)?;
        }
        core.clear_loss()?;
        for kind in before(kind, &plan) {
            core.eager(kind, None)?;
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
    slots.extend(core.plan.arenas.shadow.map(|shadow| shadow.slot));
    slots.extend(core.plan.inputs.loss_scale);
    if let Some(window) = &core.plan.window {
        slots.push(window.loss);
        slots.extend(window.seconds.iter().map(|(_, second)| *second));
        let levels = (0..window.levels.len()).flat_map(|level| window.level_tensors(level));
        slots.extend(levels.map(|(_, slot)| slot));
    }
    if let Some(half) = core.plan.output {
        slots.extend([half.output, half.gradient]);
        slots.extend(half.input_grad);
    }
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
