//! Two devices in step: a difference is found at its call, tensor and index, and nowhere else.

use bitstep::backend::Backend;
use bitstep::cpu::simd::SimdPath;
use bitstep::cuda::products::GemmChoice;
use bitstep::engine::lockstep::{Compared, Divergence, Lockstep};
use bitstep::engine::run::plan_of;
use bitstep::error::{DeviceError, Error};
use bitstep::io::Recipe;
use bitstep::op::Access;
use bitstep::plan::{Plan, ProgramKind};

use super::common::*;
use super::faulty::{Faulty, Flip, Plans};
use crate::gpu;

/// A model whose sizes are no multiple of any tile, with tied heads and query norms or without.
fn recipe(family: &str, tied: bool) -> Recipe {
    let text = format!(
        r#"
name = "step"
seed = 5
steps = 4
[model]
family = "{family}"
vocab_size = 64
d_model = 24
n_layers = 1
n_heads = 4
n_kv_heads = 2
head_dim = 6
d_ff = 20
tie_embeddings = {tied}
[data]
batch = 3
seq_len = 16
[optimizer]
lr = 1e-2
[schedule]
kind = "cosine"
warmup = 1
"#
    );
    Recipe::from_toml(&text, "step.toml").expect("a recipe")
}

fn compare<B: Backend>(recipe: &Recipe, right: B, steps: u64) -> Compared {
    let lockstep = Lockstep::open(recipe.clone(), cpu(1), right).expect("opens");
    lockstep.run(steps, |_| {}).expect("runs")
}

fn faulty(plans: &Plans) -> Faulty {
    Faulty {
        cpu: cpu(1),
        plans: plans.clone(),
    }
}

/// What is found when a bit is flipped after a launch.
fn found(recipe: &Recipe, launch: u32, offset: usize, steps: u64) -> Divergence {
    let plans = Plans::default();
    plans.flip.set(Some(Flip { launch, offset }));
    let compared = compare(recipe, faulty(&plans), steps);
    compared.divergence.expect("a flipped bit is found")
}

fn plan_and_calls(recipe: &Recipe) -> (Plan, usize) {
    let plan = plan_of(recipe).expect("plans");
    let calls = plan.calls(ProgramKind::Step).len();
    (plan, calls)
}

#[test]
fn threads_and_paths_of_the_cpu_are_in_step() {
    for family in ["llama", "qwen2", "qwen3"] {
        for tied in [false, true] {
            let recipe = recipe(family, tied);
            let (plan, calls) = plan_and_calls(&recipe);
            let compared = compare(&recipe, cpu_on(SimdPath::Scalar, 2), 3);
            assert_eq!(compared.divergence, None);
            assert_eq!((compared.steps, compared.calls), (3, 3 * calls));
            let calls = plan.layout.place(plan.calls(ProgramKind::Step));
            let written = calls.iter().flat_map(|c| &c.writes).map(|r| r.bytes);
            assert_eq!(compared.bytes, 3 * written.sum::<usize>());
        }
    }
}

#[test]
fn a_step_in_lockstep_is_a_step_of_the_run() {
    let recipe = recipe("llama", false);
    let mut run = bitstep::engine::run::Run::open(recipe.clone(), cpu(1)).expect("opens");
    let expected: Vec<_> = (0..4).map(|_| run.step(None).expect("steps")).collect();
    let mut told = Vec::new();
    let lockstep = Lockstep::open(recipe, cpu(1), cpu(2)).expect("opens");
    lockstep.run(4, |report| told.push(*report)).expect("runs");
    assert_eq!(told, expected);
}

#[test]
fn one_flipped_bit_of_any_output_is_found_at_its_call() {
    let recipe = recipe("qwen3", true);
    let (plan, count) = plan_and_calls(&recipe);
    let calls = plan.layout.place(plan.calls(ProgramKind::Step));
    let mut completed_later = 0;
    for (index, call) in calls.iter().enumerate() {
        let operands = call.call.op.rule().signature().writes;
        for (output, &slot) in call.call.writes.iter().enumerate() {
            let spec = plan.slots.spec(slot);
            let partial = operands[output].access == Access::Partial;
            completed_later += usize::from(partial);
            // What a call writes of a tensor that the next one completes is its beginning.
            let element = match partial {
                true => 0,
                false => spec.shape.elements() - 1,
            };
            let offset = call.writes[output].offset + element * spec.dtype.size();
            let step = index as u64 % 2;
            let launch = (step as usize * count + index) as u32;
            let found = found(&recipe, launch, offset, 2);
            let place = found.call.as_ref().expect("a call");
            let stem = call.call.op.rule().stem();
            assert_eq!((found.step, place.index, place.stem), (step, index, stem));
            assert_eq!((&found.tensor, found.index), (&spec.name, element));
            assert_eq!(found.differing, (1, spec.shape.elements()), "{stem}");
            assert_eq!(found.bits[0] ^ found.bits[1], 1, "{stem}");
            assert_eq!(place.changed_operand, None, "{stem}");
            assert!(place.kernels[0].starts_with("cpu::"), "{place:?}");
        }
    }
    assert!(completed_later > 0, "a tensor is written by two calls");
}

#[test]
fn an_element_of_the_parameter_arena_is_named_by_its_parameter() {
    let recipe = recipe("llama", false);
    let (plan, count) = plan_and_calls(&recipe);
    for param in &plan.params {
        let region = plan.layout.region(param.slot);
        let moment = plan.layout.region(param.state.expect("trained").moment1);
        for (region, prefix) in [(region, ""), (moment, "moment1.")] {
            let found = found(&recipe, count as u32 - 1, region.offset + 4, 1);
            assert_eq!(found.call.as_ref().expect("a call").stem, "adamw");
            assert_eq!(found.part, Some((format!("{prefix}{}", param.name), 1)));
        }
    }
}

#[test]
fn a_write_beside_the_outputs_is_told_as_such() {
    let recipe = recipe("llama", false);
    let (plan, count) = plan_and_calls(&recipe);
    let weight = plan.params.iter().find(|p| p.name.contains("down_proj"));
    let offset = plan.layout.region(weight.expect("a weight").slot).offset;
    // A weight changed by the first call: the first that reads it differs, through no fault of its own.
    let read = found(&recipe, 0, offset, 1);
    let place = read.call.expect("a call");
    assert_eq!(place.stem, "matmul");
    let changed = place.changed_operand.expect("an operand differs already");
    assert!(changed.contains("down"), "{changed}");
    // Token ids changed by the last call: nothing of the step reads them any more.
    let ids = plan.layout.region(plan.inputs.ids).offset;
    let unread = found(&recipe, count as u32 - 1, ids, 1);
    assert_eq!((unread.call, &*unread.tensor), (None, "input_ids"));
    assert_eq!((unread.step, unread.index), (0, 0));
}

#[test]
fn digests_that_differ_over_equal_bytes_are_a_fault_of_a_device() {
    let plans = Plans::default();
    plans.digest_fails.set(true);
    let recipe = recipe("llama", false);
    let lockstep = Lockstep::open(recipe, cpu(1), faulty(&plans)).expect("opens");
    let refused = lockstep.run(1, |_| {}).err();
    assert!(
        matches!(&refused, Some(Error::Device(DeviceError::Digest { .. }))),
        "{refused:?}"
    );
}

#[test]
fn a_fault_of_one_device_ends_the_comparison() {
    let plans = Plans::default();
    plans.launches_left.set(Some(3));
    let recipe = recipe("llama", false);
    let lockstep = Lockstep::open(recipe, cpu(1), faulty(&plans)).expect("opens");
    let refused = lockstep.run(1, |_| {}).err();
    assert!(
        matches!(&refused, Some(Error::Device(DeviceError::Driver { .. }))),
        "{refused:?}"
    );
}

#[test]
fn the_cpu_and_a_gpu_are_in_step() {
    for choice in [GemmChoice::Own, GemmChoice::Auto] {
        for family in ["llama", "qwen2", "qwen3"] {
            for tied in [false, true] {
                let Some(cuda) = gpu::open(choice) else {
                    return;
                };
                let compared = compare(&recipe(family, tied), cuda, 4);
                assert_eq!(
                    compared.divergence, None,
                    "{family}, tied {tied}, {choice:?}"
                );
                assert_eq!(compared.steps, 4);
            }
        }
    }
}
