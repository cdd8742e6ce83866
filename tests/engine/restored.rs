//! Outputs that backward writes again: the bits of kept ones in less memory.

use std::sync::Arc;

use bitstep::model::decoder::Decoder;
use bitstep::model::lora::{Base, LoraConfig, Norms, Projection};
use bitstep::model::{Family, Model};
use bitstep::op::swiglu::{Output, SwiGluGrad};
use bitstep::op::{Op, OpCall};
use bitstep::plan::{
    Passes, Plan, PlanConfig, ProgramKind, RESTORED_ELEMENTS, Recompute, StepForm,
};
use bitstep::shape::Math;

use super::recompute::{LAYERS, adapted, config, decoder, digests, mamba};

const ALWAYS: usize = 0;
const NEVER: usize = usize::MAX;

fn planned(
    model: &dyn Model,
    math: Math,
    (form, restored_elements): (StepForm, usize),
) -> Arc<Plan> {
    let config = PlanConfig {
        math,
        form,
        restored_elements,
        grain: 1,
        ..PlanConfig::of(2, 11)
    };
    Arc::new(Plan::build(model, config).expect("plans"))
}

/// An adapter of the down projections alone: nothing below that of the first layer is trained.
fn adapted_down() -> Decoder {
    let lora = LoraConfig {
        rank: 3,
        alpha: 6.0,
        targets: vec![Projection::Down],
        norms: Norms::Frozen,
        base: Base::Plain,
    };
    Decoder::with_adapters(config(Family::Llama), lora)
}

fn models() -> Vec<Box<dyn Model>> {
    vec![
        Box::new(decoder(Family::Llama)),
        Box::new(decoder(Family::Qwen3)),
        Box::new(adapted()),
        Box::new(adapted_down()),
    ]
}

fn swiglu_grads(calls: &[OpCall]) -> Vec<&SwiGluGrad> {
    let grads = calls.iter().filter_map(|call| match &call.op {
        Op::SwiGluGrad(op) => Some(op),
        _ => None,
    });
    grads.collect()
}

fn restored(plan: &Plan) -> usize {
    let grads = swiglu_grads(plan.calls(ProgramKind::Step));
    let restored = grads.iter().filter(|op| op.output == Output::Restored);
    restored.count()
}

#[test]
fn restored_outputs_give_the_bits_of_kept_ones() {
    for model in models() {
        for math in [Math::F32, Math::Tf32, Math::Bf16, Math::F16] {
            let plan = |elements| planned(model.as_ref(), math, (StepForm::default(), elements));
            let (kept, again) = (plan(NEVER), plan(ALWAYS));
            assert_eq!(restored(&kept), 0);
            assert!(restored(&again) >= LAYERS - 1);
            assert!(digests(&kept) == digests(&again), "{math}");
        }
    }
}

#[test]
fn restored_outputs_go_with_recomputation_passes_and_halves() {
    for model in [&decoder(Family::Qwen3) as &dyn Model, &adapted()] {
        let plan = |form| planned(model, Math::Bf16, form);
        let kept = digests(&plan((StepForm::default(), NEVER)));
        for recompute in [None, Some(1), Some(2)].map(Recompute::from) {
            for passes in [
                Passes::Whole,
                Passes::Micro { sequences: 1 },
                Passes::Halves { most_passes: 1 },
            ] {
                let form = StepForm { passes, recompute };
                assert!(digests(&plan((form, ALWAYS))) == kept, "{form:?}");
            }
        }
    }
}

/// Mamba's scan writes its output again too, into a tensor of its own.
#[test]
fn a_restored_scan_gives_the_bits_of_a_kept_one() {
    let scans = |plan: &Plan| {
        let calls = plan.calls(ProgramKind::Step).iter();
        let restores = |call: &&OpCall| matches!(&call.op, Op::ScanGrad(op) if op.restore);
        calls.filter(restores).count()
    };
    for math in [Math::F32, Math::Bf16] {
        let plan = |form, elements| planned(&mamba(), math, (form, elements));
        let kept = plan(StepForm::default(), NEVER);
        assert_eq!(scans(&kept), 0);
        let expected = digests(&kept);
        for recompute in [None, Some(1)].map(Recompute::from) {
            let form = StepForm {
                recompute,
                ..StepForm::default()
            };
            let again = plan(form, ALWAYS);
            assert_eq!(scans(&again), LAYERS);
            assert!(digests(&again) == expected, "{math} {recompute:?}");
        }
        let local = |p: &Plan| p.layout.arena_bytes() - p.layout.persistent_bytes();
        assert!(local(&plan(StepForm::default(), ALWAYS)) < local(&kept));
    }
}

/// What forward has written is read by forward alone, so it needs no memory from there to its backward.
#[test]
fn forwards_output_lives_until_its_product_alone() {
    for model in models() {
        let plan = |elements| planned(model.as_ref(), Math::F32, (StepForm::default(), elements));
        let again = plan(ALWAYS);
        let calls = again.calls(ProgramKind::Step);
        let restored_writes = calls.iter().enumerate().filter_map(|(index, call)| {
            let restores = matches!(&call.op, Op::SwiGluGrad(op) if op.output == Output::Restored);
            restores.then(|| (index, call.writes[1]))
        });
        let mut seen = 0;
        for (index, gate_up) in restored_writes {
            let forward =
                |call: &&OpCall| matches!(call.op, Op::SwiGlu(_)) && call.reads[0] == gate_up;
            let output = calls.iter().find(forward).expect("its forward").writes[0];
            let last = calls.iter().rposition(|call| call.reads.contains(&output));
            let last = last.expect("its product");
            assert!(matches!(calls[last].op, Op::Matmul(_) | Op::LoraDown(_)));
            assert!(last < index);
            seen += 1;
        }
        assert!(seen >= LAYERS - 1);
        let local = |p: &Plan| p.layout.arena_bytes() - p.layout.persistent_bytes();
        assert!(local(&again) < local(&plan(NEVER)));
    }
}

/// With the first layer's adapter alone below, there is no gradient whose place its output could take.
#[test]
fn an_output_without_a_gradient_is_kept() {
    let plan = planned(&adapted_down(), Math::F32, (StepForm::default(), ALWAYS));
    let calls = plan.calls(ProgramKind::Step);
    assert_eq!(swiglu_grads(calls).len(), LAYERS - 1);
    let first = calls
        .iter()
        .find(|call| matches!(call.op, Op::SwiGlu(_)))
        .expect("a first layer")
        .writes[0];
    let gradient = |call: &&OpCall| matches!(call.op, Op::MatmulGradWeight(_));
    let readers = calls.iter().filter(gradient);
    assert_eq!(readers.filter(|call| call.reads[1] == first).count(), 1);
}

/// Both gradients of a small layer stay neighbours, as devices compute them in one launch.
#[test]
fn small_outputs_are_kept_and_large_ones_restored() {
    let model = decoder(Family::Llama);
    let plan = |elements| planned(&model, Math::Bf16, (StepForm::default(), elements));
    let small = 2 * 11 * 36;
    assert!(small < RESTORED_ELEMENTS);
    let usual = plan(RESTORED_ELEMENTS);
    assert_eq!(
        usual.calls(ProgramKind::Step),
        plan(NEVER).calls(ProgramKind::Step)
    );
    assert_eq!(restored(&plan(small + 1)), 0);
    assert_eq!(restored(&plan(small)), LAYERS);
}
