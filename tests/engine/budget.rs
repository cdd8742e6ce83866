//! Recomputation within a budget of the arena: the bits of stored activations in as much memory as there is.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use bitstep::engine::run::{backbone_plan_of, model_of, plan_of};
use bitstep::error::PlanError;
use bitstep::golden::verify::verify;
use bitstep::golden::{GoldenFile, Verdict};
use bitstep::io::Recipe;
use bitstep::model::{Family, Model};
use bitstep::op::Op;
use bitstep::plan::{Passes, Plan, PlanConfig, ProgramKind, Recompute, StepForm};
use bitstep::shape::Math;

use super::common::{VOCAB, cpu};
use super::recompute::{LAYERS, adapted, decoder, digests, mamba};
use super::values::results;

fn form(passes: Passes, recompute: Recompute) -> StepForm {
    StepForm { passes, recompute }
}

/// Two sequences, or four in passes.
fn build(
    model: &dyn Model,
    (math, form): (Math, StepForm),
    restored_elements: usize,
) -> Result<Plan, PlanError> {
    let config = PlanConfig {
        math,
        form,
        restored_elements,
        grain: 1,
        ..PlanConfig::of(4, 35)
    };
    Plan::build(model, config)
}

fn within(arena_bytes: usize) -> Recompute {
    Recompute::Within { arena_bytes }
}

/// The arena with everything kept, and with everything computed again.
fn extremes(model: &dyn Model, math: Math, passes: Passes, restored: usize) -> [usize; 2] {
    let kept = build(model, (math, form(passes, Recompute::Nothing)), restored);
    let refused = build(model, (math, form(passes, within(1))), restored);
    let Err(PlanError::ArenaBudget {
        budget_bytes: 1,
        needed_bytes,
    }) = refused
    else {
        panic!("one byte is too little");
    };
    [kept.expect("plans").layout.arena_bytes(), needed_bytes]
}

/// Budgets from that which needs everything to be computed again up to that which needs nothing.
fn budgets([kept, least]: [usize; 2], count: usize) -> impl Iterator<Item = usize> {
    (0..=count).map(move |i| least + (kept - least) * i / count)
}

fn models() -> Vec<Box<dyn Model>> {
    vec![
        Box::new(decoder(Family::Llama)),
        Box::new(decoder(Family::Qwen2)),
        Box::new(decoder(Family::Qwen3)),
        Box::new(adapted()),
        Box::new(mamba()),
    ]
}

const PASSES: [Passes; 3] = [
    Passes::Whole,
    Passes::Micro { sequences: 1 },
    Passes::Halves { most_passes: 1 },
];

fn never() -> usize {
    usize::MAX
}

#[test]
fn a_budget_never_decides_a_bit() {
    for model in models() {
        for math in [Math::F32, Math::Bf16] {
            let stored = build(model.as_ref(), (math, StepForm::default()), never());
            let stored = digests(&Arc::new(stored.expect("plans")));
            for (passes, restored) in PASSES.into_iter().zip([never(), 0, never()]) {
                let ends = extremes(model.as_ref(), math, passes, restored);
                for budget in budgets(ends, 3) {
                    let form = form(passes, within(budget));
                    let plan = build(model.as_ref(), (math, form), restored).expect("fits");
                    assert!(digests(&Arc::new(plan)) == stored, "{math} {form:?}");
                }
            }
        }
    }
}

#[test]
fn the_arena_never_passes_its_budget_and_every_budget_between_the_ends_is_kept() {
    for model in models() {
        for passes in PASSES {
            for restored in [never(), 0] {
                let ends = extremes(model.as_ref(), Math::Bf16, passes, restored);
                let plan = |budget| {
                    let form = form(passes, within(budget));
                    build(model.as_ref(), (Math::Bf16, form), restored)
                };
                assert!(ends[1] < ends[0], "{ends:?}");
                assert!(plan(ends[1] - 1).is_err());
                for budget in budgets(ends, 24) {
                    let plan = plan(budget).expect("fits");
                    let bytes = plan.layout.arena_bytes();
                    assert!(bytes <= budget, "{bytes} of {budget}");
                    assert_eq!(plan.computed_again().is_empty(), budget == ends[0]);
                }
            }
        }
    }
}

/// The programs compute the same values at every budget, which holds for sizes that cannot be run here.
#[test]
fn a_budgeted_program_computes_the_values_of_the_stored_one() {
    for model in models() {
        for passes in PASSES {
            let kept = build(
                model.as_ref(),
                (Math::Bf16, form(passes, Recompute::Nothing)),
                0,
            );
            let kept = kept.expect("plans");
            let ends = extremes(model.as_ref(), Math::Bf16, passes, 0);
            for budget in budgets(ends, 24) {
                let form = form(passes, within(budget));
                let plan = build(model.as_ref(), (Math::Bf16, form), 0).expect("fits");
                same_values(&kept, &plan);
            }
        }
    }
}

/// Programs after which the same tensors have been written.
fn spans(plan: &Plan) -> Vec<Vec<bitstep::op::OpCall>> {
    let calls = |kind| plan.calls(kind).to_vec();
    let halves = [ProgramKind::Forward, ProgramKind::Backward].map(calls);
    let spans = [
        calls(ProgramKind::Step),
        calls(ProgramKind::Accumulate),
        halves.concat(),
    ];
    spans.into_iter().filter(|span| !span.is_empty()).collect()
}

fn same_values(kept: &Plan, plan: &Plan) {
    let (kept_spans, spans) = (spans(kept), spans(plan));
    assert_eq!(kept_spans.len(), spans.len());
    for (kept_calls, calls) in kept_spans.iter().zip(&spans) {
        assert!(results(kept, kept_calls) == results(plan, calls));
    }
}

/// The control of the equalities above: without an update that stands again the values are others.
#[test]
fn a_program_that_leaves_out_an_update_computes_other_values() {
    let model = adapted();
    let kept = build(&model, (Math::Bf16, StepForm::default()), 0).expect("plans");
    let ends = extremes(&model, Math::Bf16, Passes::Whole, 0);
    let form = form(Passes::Whole, within(ends[1]));
    let plan = build(&model, (Math::Bf16, form), 0).expect("fits");
    let calls = plan.calls(ProgramKind::Step);
    let expected = results(&kept, kept.calls(ProgramKind::Step));
    assert!(results(&plan, calls) == expected);
    let name = |call: &bitstep::op::OpCall| plan.slots.spec(call.writes[0]).name.clone();
    let again = calls.iter().enumerate();
    let again = again.filter(|(_, call)| name(call).starts_with("again."));
    let again: Vec<usize> = again.map(|(index, _)| index).collect();
    let updates = again
        .iter()
        .filter(|&&i| matches!(calls[i].op, Op::LoraUp(_)));
    assert!(updates.count() >= LAYERS);
    for index in again {
        let mut less = calls.to_vec();
        less.remove(index);
        assert!(results(&plan, &less) != expected, "{index} is of no use");
    }
}

#[test]
fn a_golden_holds_within_a_budget() {
    for (name, share) in [("qwen3-tiny", 3), ("mamba-tiny", 2), ("qlora-tiny", 3)] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
        let golden = GoldenFile::read(&folder.join(format!("{name}.golden"))).expect("the golden");
        let recipe = Recipe::from_path(&folder.join(format!("{name}.toml"))).expect("the recipe");
        let plan = |text: &str| {
            let mut recipe = recipe.clone();
            recipe.set_memory(text).expect("fits");
            plan_of(&recipe)
        };
        let kept = plan("memory.recompute=0").expect("plans").layout;
        let least = plan("memory.recompute=1").expect("plans").layout;
        let span = kept.arena_bytes() - least.arena_bytes();
        let budget = least.arena_bytes() + span / share;
        let mut budgeted = recipe.clone();
        let text = format!("memory.arena_bytes={budget}");
        budgeted.set_memory(&text).expect("fits");
        let plan = plan(&text).expect("fits");
        assert!(!plan.computed_again().is_empty());
        assert!(plan.layout.arena_bytes() <= budget);
        let verified = verify(&golden, &budgeted, cpu(2), None).expect("runs");
        assert_eq!(verified.verdict, Verdict::Identical, "{name}");
        assert_eq!(verified.fresh.manifest, golden.manifest);
    }
}

/// A recipe of `benches/recipes` with a budget.
fn bench_recipe(name: &str, arena_bytes: usize) -> Recipe {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/recipes");
    let mut recipe = Recipe::from_path(&folder.join(format!("{name}.toml"))).expect("a recipe");
    let text = format!("memory.arena_bytes={arena_bytes}");
    recipe.set_memory(&text).expect("fits");
    recipe
}

/// Of a head that is not trained the chunks decide no bit, whatever their size: a budget may make them smaller.
#[test]
fn the_chunks_of_a_frozen_head_decide_no_bit() {
    for math in [Math::F32, Math::Bf16] {
        let chunked = |rows: usize| {
            let config = PlanConfig {
                math,
                chunk_logits: rows * VOCAB,
                ..PlanConfig::of(4, 35)
            };
            Arc::new(Plan::build(&adapted(), config).expect("plans"))
        };
        let whole = chunked(1000);
        assert_eq!(whole.logits.len(), 1);
        let expected = digests(&whole);
        for rows in [1, 3, 16, 64, 139] {
            let plan = chunked(rows);
            assert!(plan.logits.len() > 1);
            assert!(digests(&plan) == expected, "{math}, {rows} rows");
        }
    }
}

/// The sizes of the benchmarks within the memory that their peers take, less what kernels need beside the arena.
#[test]
fn the_sizes_of_the_benchmarks_fit_their_budgets() {
    let budgets = [
        ("mamba-lm-bf16", 3_100_000_000 - 115_000_000),
        ("lora-qwen06-bf16", 3_960_000_000 - 120_000_000),
        ("lora-qwen06-nf4-bf16", 3_500_000_000),
        ("qwen06-bf16", 17_400_000_000 - 80_000_000),
    ];
    for (name, budget) in budgets {
        let recipe = bench_recipe(name, budget);
        let backbone = name.starts_with("mamba");
        let clock = Instant::now();
        let plan = if backbone { backbone_plan_of } else { plan_of };
        let plan = plan(&recipe).expect("fits");
        let took = clock.elapsed();
        // The stored form with as many logits at once: a frozen head may run in smaller chunks.
        let model = match backbone {
            true => recipe.model_config().expect("a model").backbone(),
            false => Some(model_of(&recipe).expect("a model")),
        };
        let config = PlanConfig {
            form: StepForm::default(),
            ..plan.config.clone()
        };
        let kept = Plan::build(model.expect("a backbone").as_ref(), config).expect("plans");
        let bytes = plan.layout.arena_bytes();
        assert!(bytes <= budget, "{name}: {bytes}");
        // The search ends near the budget.
        assert!(bytes > budget - budget / 50, "{name}: {bytes}");
        same_values(&kept, &plan);
        println!("{name}: {bytes} of {budget}, planned in {took:?}");
        let seconds: f64 = plan.computed_again().iter().map(|a| a.seconds).sum();
        println!(
            "  kept {}, {:.3} ms more",
            kept.layout.arena_bytes(),
            1e3 * seconds
        );
        for again in plan.computed_again() {
            println!("  {again:?}");
        }
    }
}
