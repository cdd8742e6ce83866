//! Finds where a run left its golden, down to op and element.
//!
//! A golden holds digests, so the expected values must be computed again: an independent run (eager, one
//! thread, another SIMD path where there is one) goes to the same step. Where it agrees with the golden,
//! this run is at fault, and both can be compared element by element: first the state before the step,
//! then the outputs of the step's ops one after another, at last the state after it.

use std::sync::Arc;

use super::compare::{Element, FirstDifference, OpPlace};
use super::file::{GoldenFile, OpLine, StepLine};
use super::record::{Departure, Trace};
use crate::backend::Backend;
use crate::cpu::CpuBackend;
use crate::cpu::context::CpuContext;
use crate::cpu::simd::SimdPath;
use crate::engine::run::Run;
use crate::engine::snapshot::Snapshot;
use crate::engine::step::Observe;
use crate::error::{DeviceError, Error};
use crate::layout::PlacedCall;
use crate::num::element::decode;
use crate::plan::Plan;
use crate::shape::DType;

/// Fills in tensor, op and element of a difference, or says why they cannot be known here.
///
/// # Errors
/// Whatever stops the independent run.
pub fn locate<B: Backend>(
    difference: &mut FirstDifference,
    golden: &GoldenFile,
    (run, departure): (&mut Run<B>, &Departure),
) -> Result<(), Error> {
    let step = departure.step;
    let mut reference = open_reference(run)?;
    for _ in 0..step {
        reference.step(None)?;
    }
    let clean = reference.trainer.session_mut().snapshot()?;
    let (expected, line) = traced_step(&mut reference, &clean)?;
    if golden.steps.get(step as usize) != Some(&line) {
        difference.note =
            "an independent run on this machine does not give the golden's bits either: \
            code, recipe or contract differ from those the golden was blessed with, or the golden \
            was edited; it holds digests, so the element cannot be known here"
                .into();
        return Ok(());
    }
    let after = reference.trainer.session_mut().snapshot()?;
    let plan = run.trainer.session().plan().clone();
    let before_step = first_element(&plan, &clean, &departure.before);
    // The step again from where this run started it, op by op, on the run's own device.
    let (found, _) = traced_step(run, &departure.before)?;
    let op = expected
        .iter()
        .zip(&found)
        .find(|(a, b)| a != b)
        .map(|(a, _)| a.clone());
    if let Some(line) = &op {
        difference.op = Some(OpPlace {
            call: line.call,
            stem: line.stem.clone(),
            kernel: kernel_of(run, line.call),
        });
    }
    if let Some((tensor, element)) = before_step {
        difference.tensor = Some(tensor);
        difference.element = Some(element);
        difference.note = format!(
            "the state before step {step} differs already: something outside the step's ops wrote \
             to the tensor; the op named is the first whose output differs for it"
        );
        return Ok(());
    }
    if let Some(line) = op {
        let a = output_of(&mut reference, &clean, &line)?;
        let b = output_of(run, &departure.before, &line)?;
        difference.tensor = Some(line.tensor.clone());
        let storage = plan.slots.iter().map(|(_, def)| &def.spec);
        let storage = storage
            .filter(|spec| spec.name == line.tensor)
            .map(|s| s.dtype);
        difference.element = first_stored(storage.last(), (&a, &b));
        difference.note =
            "found by running the step again op by op beside an independent run".into();
        return Ok(());
    }
    if let Some((tensor, element)) = first_element(&plan, &after, &departure.after) {
        difference.tensor = Some(tensor);
        difference.element = Some(element);
    }
    difference.note =
        "running the step again from the same state gave the golden's bits: the fault \
        did not repeat (a race, failing memory, or a fault of the captured replay)"
            .into();
    Ok(())
}

fn kernel_of<B: Backend>(run: &Run<B>, call: usize) -> String {
    let executions = run.trainer.session().executions();
    let found = executions.into_iter().find(|e| e.call == call);
    found.map_or_else(|| "unknown".into(), |e| e.kernel)
}

/// An eager run on one thread, on another SIMD path than the widest where there is one.
fn open_reference<B: Backend>(run: &Run<B>) -> Result<Run<CpuBackend>, Error> {
    let mut recipe = run.recipe.clone();
    recipe.warmup_steps = u32::MAX;
    let vectors: Vec<SimdPath> = SimdPath::available()
        .into_iter()
        .filter(|&p| p != SimdPath::Scalar && p != SimdPath::detect())
        .collect();
    let path = vectors.last().copied().unwrap_or_else(SimdPath::detect);
    Run::open(recipe, CpuBackend::new(CpuContext::new(path, 1)?))
}

/// Runs one step from a snapshot, eagerly: the digests of all outputs, and the step's line.
fn traced_step<B: Backend>(
    run: &mut Run<B>,
    from: &Snapshot,
) -> Result<(Vec<OpLine>, StepLine), Error> {
    run.trainer.thaw();
    run.trainer.session_mut().restore(from)?;
    let plan = run.trainer.session().plan().clone();
    let mut trace = Trace {
        plan,
        step: from.progress.taken,
        lines: Vec::new(),
    };
    let report = run.step(Some(&mut trace))?;
    let root = run.trainer.session_mut().root()?;
    Ok((trace.lines, StepLine::of(&report, root)))
}

/// The bytes of the output that `line` names, from a step that starts at `from`.
fn output_of<B: Backend>(
    run: &mut Run<B>,
    from: &Snapshot,
    line: &OpLine,
) -> Result<Vec<u8>, Error> {
    run.trainer.thaw();
    run.trainer.session_mut().restore(from)?;
    let plan = run.trainer.session().plan().clone();
    let mut reader = OutputReader {
        plan,
        line,
        bytes: Vec::new(),
    };
    run.step(Some(&mut reader))?;
    Ok(reader.bytes)
}

struct OutputReader<'a> {
    plan: Arc<Plan>,
    line: &'a OpLine,
    bytes: Vec<u8>,
}

impl<B: Backend> Observe<B> for OutputReader<'_> {
    fn after(
        &mut self,
        index: usize,
        call: &PlacedCall,
        (backend, arena): (&B, &B::Arena),
    ) -> Result<(), DeviceError> {
        if index != self.line.call {
            return Ok(());
        }
        let named = |&(slot, _): &(&crate::op::Slot, _)| {
            self.plan.slots.spec(*slot).name == self.line.tensor
        };
        let outputs = call.call.writes.iter().zip(&call.writes);
        if let Some((_, &region)) = outputs.into_iter().find(named) {
            self.bytes = vec![0; region.bytes];
            backend.read(arena, region, &mut self.bytes)?;
        }
        Ok(())
    }
}

/// The first element of a parameter or moment that differs between two snapshots.
fn first_element(plan: &Plan, expected: &Snapshot, found: &Snapshot) -> Option<(String, Element)> {
    for param in &plan.params {
        let mut slots = vec![param.slot];
        slots.extend(param.state.into_iter().flat_map(|s| [s.moment1, s.moment2]));
        for slot in slots {
            let region = plan.layout.region(slot);
            let (a, b) = (expected.region(region)?, found.region(region)?);
            if let Some(element) = first_word(a, b) {
                return Some((plan.slots.spec(slot).name.clone(), element));
            }
        }
    }
    None
}

/// The first element that differs, a narrow float shown as the f32 of its value.
fn first_stored(storage: Option<DType>, (expected, found): (&[u8], &[u8])) -> Option<Element> {
    let Some(narrow @ (DType::Bf16 | DType::F16)) = storage else {
        return first_word(expected, found);
    };
    let size = narrow.size();
    let mut pairs = expected.chunks(size).zip(found.chunks(size));
    let index = pairs.position(|(a, b)| a != b)?;
    let value = |bytes: &[u8]| {
        let element = bytes.get(index * size..(index + 1) * size)?;
        Some(decode(narrow, element)?.first()?.to_bits())
    };
    Some(Element {
        index,
        expected: value(expected)?,
        found: value(found)?,
    })
}

fn first_word(expected: &[u8], found: &[u8]) -> Option<Element> {
    let words = |bytes: &[u8], i: usize| -> Option<u32> {
        let word = bytes.get(4 * i..4 * i + 4)?;
        Some(u32::from_le_bytes(word.try_into().ok()?))
    };
    let count = expected.len().max(found.len()).div_ceil(4);
    let index = (0..count).find(|&i| words(expected, i) != words(found, i))?;
    Some(Element {
        index,
        expected: words(expected, index)?,
        found: words(found, index)?,
    })
}
