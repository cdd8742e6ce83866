//! Recomputation: the bits of stored activations in less memory.

use std::sync::Arc;

use bitstep::engine::{Hyper, Session};
use bitstep::model::decoder::Decoder;
use bitstep::model::lora::{Base, LoraConfig, Norms, Projection};
use bitstep::model::mamba::Mamba;
use bitstep::model::mamba_config::{MambaConfig, MambaFamily};
use bitstep::model::{Family, Model, ModelConfig};
use bitstep::num::nf4::Quantisation;
use bitstep::op::{Op, Slot};
use bitstep::plan::{Passes, Plan, PlanConfig, ProgramKind, Recompute, StepForm};
use bitstep::shape::Math;

use super::common::*;

pub(super) const LAYERS: usize = 5;

pub(super) fn decoder(family: Family) -> Decoder {
    Decoder::new(config(family))
}

/// Adapters on every projection of a base that is stored as NF4: its weights are unpacked into one scratch before
/// each product, also before those that are computed again.
pub(super) fn adapted() -> Decoder {
    let lora = LoraConfig {
        rank: 3,
        alpha: 6.0,
        targets: Projection::ALL.to_vec(),
        norms: Norms::Trained,
        base: Base::Nf4(Quantisation::Once),
    };
    Decoder::with_adapters(config(Family::Qwen3), lora)
}

pub(super) fn config(family: Family) -> ModelConfig {
    ModelConfig {
        family,
        vocab_size: VOCAB,
        d_model: 24,
        n_layers: LAYERS,
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 6,
        d_ff: 36,
        rope_theta: 1e4,
        rms_norm_eps: 1e-6,
        tie_embeddings: true,
        max_seq_len: 64,
        init_std: 0.1,
    }
}

pub(super) fn mamba() -> Mamba {
    Mamba::new(MambaConfig {
        family: MambaFamily::Mamba,
        vocab_size: VOCAB,
        d_model: 12,
        n_layers: LAYERS,
        expand: 2,
        d_state: 3,
        d_conv: 4,
        dt_rank: 2,
        rms_norm_eps: 1e-5,
        tie_embeddings: false,
        init_std: 0.1,
        decay: Default::default(),
    })
}

fn planned(model: &dyn Model, math: Math, form: StepForm) -> Arc<Plan> {
    let config = PlanConfig {
        math,
        form,
        grain: 1,
        ..PlanConfig::of(2, 11)
    };
    Arc::new(Plan::build(model, config).expect("plans"))
}

fn every(layers: Option<usize>) -> StepForm {
    StepForm {
        recompute: layers.into(),
        ..StepForm::default()
    }
}

/// Weights, gradients and moments after each of some steps.
pub(super) fn digests(plan: &Arc<Plan>) -> Vec<Vec<blake3::Hash>> {
    let mut trainer = trainer(plan, Hyper::default(), 2);
    let params = plan.params.iter();
    let mut slots: Vec<Slot> = params.clone().map(|p| p.slot).collect();
    let states = params.filter_map(|p| p.state);
    slots.extend(states.flat_map(|s| [s.grad, s.moment1, s.moment2]));
    let step = |step| {
        assert!(trainer.step(&batch(plan, step)).unwrap().applied());
        trainer.session_mut().digests(&slots).unwrap()
    };
    (0..4).map(step).collect()
}

#[test]
fn recomputed_activations_give_the_bits_of_stored_ones() {
    let families = [Family::Llama, Family::Qwen2, Family::Qwen3];
    let mut models: Vec<Box<dyn Model>> = vec![Box::new(mamba()), Box::new(adapted())];
    models.extend(families.map(|f| Box::new(decoder(f)) as Box<dyn Model>));
    for model in &models {
        for math in [Math::F32, Math::Bf16] {
            let plan = |layers| planned(model.as_ref(), math, every(layers));
            let stored = digests(&plan(None));
            for layers in [1, 2, LAYERS, 9] {
                assert!(
                    digests(&plan(Some(layers))) == stored,
                    "{math}, {layers} layers"
                );
            }
        }
    }
}

#[test]
fn recomputation_saves_memory_and_repeats_only_what_backward_reads() {
    for model in [&decoder(Family::Qwen3) as &dyn Model, &mamba()] {
        let plan = |layers| planned(model, Math::F32, every(layers));
        let stored = plan(None);
        let local = |p: &Plan| p.layout.arena_bytes() - p.layout.persistent_bytes();
        let work = |p: &Plan| p.flops(ProgramKind::Step);
        let calls = |p: &Plan| p.calls(ProgramKind::Step).len();
        let one = plan(Some(1));
        assert!(
            local(&one) * 2 < local(&stored),
            "{} of {}",
            local(&one),
            local(&stored)
        );
        assert_eq!(
            stored.layout.persistent_bytes(),
            one.layout.persistent_bytes()
        );
        assert!(work(&one) > work(&stored) && work(&one) < work(&stored) * 4 / 3);
        let again = calls(&one) - calls(&stored);
        let forward = stored.calls(ProgramKind::Evaluate).len();
        // The product that ends a layer is what no backward reads.
        assert!(
            again <= forward - LAYERS,
            "{again} of {forward} calls again"
        );
        assert_eq!(one.definition(), stored.manifest().hash());
        assert_ne!(one.manifest().hash(), stored.manifest().hash());
    }
}

#[test]
fn a_recomputed_activation_decides_the_gradient() {
    // The control of the equalities above: backward reads what was computed again, not what forward left.
    let plan = planned(&decoder(Family::Llama), Math::F32, every(Some(1)));
    let calls = plan.calls(ProgramKind::Step);
    let again: Vec<Slot> = plan
        .slots
        .iter()
        .filter(|(_, def)| def.spec.name.starts_with("again."))
        .map(|(slot, _)| slot)
        .collect();
    let reads = |slot: &Slot| {
        calls.iter().any(|call| {
            let gradient = matches!(call.op, Op::MatmulGradWeight(_) | Op::SwiGluGrad(_));
            gradient && call.reads.contains(slot)
        })
    };
    assert!(again.iter().filter(|slot| reads(slot)).count() >= 4 * LAYERS);
}

#[test]
fn recomputation_goes_with_passes_and_halves() {
    let model = decoder(Family::Qwen3);
    let stored = digests(&planned(&model, Math::F32, StepForm::default()));
    let form = |passes| StepForm {
        passes,
        recompute: Recompute::Layers(2),
    };
    let micro = planned(&model, Math::F32, form(Passes::Micro { sequences: 1 }));
    assert!(digests(&micro) == stored);
    let halves = planned(&model, Math::F32, form(Passes::Halves { most_passes: 1 }));
    assert!(digests(&halves) == stored);
    let packed = adapted();
    let stored_packed = digests(&planned(&packed, Math::Bf16, StepForm::default()));
    let micro = form(Passes::Micro { sequences: 1 });
    assert!(digests(&planned(&packed, Math::Bf16, micro)) == stored_packed);
    let mut session: Session<_> = session(&halves, 1);
    let hyper = Hyper::default();
    for step in 0..2 {
        let batch = batch(&halves, step);
        session.forward(&batch, &hyper).unwrap();
        let options = bitstep::engine::halves::BackwardOptions::update(hyper.clip_norm, None);
        session.backward_targets(&batch, &hyper, &options).unwrap();
    }
    let params: Vec<Slot> = halves.params.iter().map(|p| p.slot).collect();
    assert!(session.digests(&params).unwrap()[..] == stored[1][..params.len()]);
}
