//! Tests of adapters in a plan: what is placed, what is called, what is refused.

use super::*;
use crate::model::config::{Family, ModelConfig};
use crate::model::decoder::Decoder;
use crate::op::Op;
use crate::plan::{Plan, PlanConfig, ProgramKind, StepForm, Stored};
use crate::shape::{DType, Math, Role};

fn lora(targets: &[Projection]) -> LoraConfig {
    LoraConfig {
        rank: 4,
        alpha: 8.0,
        targets: targets.to_vec(),
        norms: Norms::Frozen,
        base: Base::Plain,
    }
}

fn plan_in(math: Math, lora: LoraConfig) -> Result<Plan, PlanError> {
    let model = ModelConfig {
        family: Family::Qwen3,
        vocab_size: 32,
        d_model: 24,
        n_layers: 2,
        n_heads: 2,
        n_kv_heads: 1,
        head_dim: 10,
        d_ff: 36,
        rope_theta: 1e4,
        rms_norm_eps: 1e-5,
        tie_embeddings: false,
        max_seq_len: 8,
        init_std: 0.02,
    };
    let config = PlanConfig {
        math,
        ..PlanConfig::of(2, 8)
    };
    Plan::build(&Decoder::with_adapters(model, lora), config)
}

fn plan(lora: LoraConfig) -> Plan {
    plan_in(Math::F32, lora).expect("the model plans")
}

fn count(plan: &Plan, is: impl Fn(&Op) -> bool) -> usize {
    let calls = plan.calls(ProgramKind::Step).iter();
    calls.filter(|c| is(&c.op)).count()
}

#[test]
fn frozen_parameters_have_no_gradient_no_moments_and_no_gradient_call() {
    let plan = plan(lora(&Projection::ALL));
    for param in &plan.params {
        let adapter = param.name.starts_with(PEFT_PREFIX);
        assert_eq!(param.state.is_some(), adapter, "{}", param.name);
    }
    let trained: usize = plan
        .params
        .iter()
        .filter(|p| p.state.is_some())
        .map(|p| plan.shape_of(p).elements().next_multiple_of(64))
        .sum();
    let elements = |slot| plan.slots.spec(slot).shape.elements();
    let arenas = plan.arenas;
    for arena in [arenas.param, arenas.grad, arenas.moment1, arenas.moment2] {
        assert!(elements(arena) <= trained);
    }
    // The gradient of each `A`, and no other weight's.
    assert_eq!(count(&plan, |op| matches!(op, Op::MatmulGradWeight(_))), 8);
    assert_eq!(count(&plan, |op| matches!(op, Op::EmbedGrad(_))), 0);
}

#[test]
fn a_fused_product_has_one_pair_of_calls_for_all_its_adapters() {
    let plan = plan(lora(&[Projection::Query, Projection::Value]));
    assert_eq!(count(&plan, |op| matches!(op, Op::LoraDown(_))), 2);
    assert_eq!(count(&plan, |op| matches!(op, Op::LoraUp(_))), 2);
    let calls = plan.calls(ProgramKind::Step).iter();
    let up = calls.clone().find_map(|c| match &c.op {
        Op::LoraUp(op) => Some(op),
        _ => None,
    });
    let adapters = &up.expect("an adapted product").adapters;
    let parts = [(0, 20), (30, 10)].map(|(first, columns)| Part { first, columns });
    assert_eq!((&adapters.parts[..], adapters.scale), (&parts[..], 2.0));
    // Nothing before the first adapter needs a gradient, so the lowest layer stops there.
    let inputs = count(&plan, |op| matches!(op, Op::LoraDownGradInput(_)));
    assert_eq!(inputs, 1);
}

#[test]
fn trained_norms_are_trained_without_decay() {
    let mut config = lora(&[Projection::Down]);
    config.norms = Norms::Trained;
    let plan = plan(config);
    for param in plan.params.iter().filter(|p| p.name.contains("norm")) {
        assert_eq!(param.training, Training::Undecayed, "{}", param.name);
    }
    let rest = plan.params.iter().filter(|p| p.state.is_none());
    assert!(rest.clone().count() > 0);
    assert!(rest.clone().all(|p| !p.name.contains("norm")));
}

#[test]
fn a_packed_base_has_codes_maxima_and_one_scratch() {
    for math in Math::ALL {
        let mut config = lora(&Projection::ALL);
        config.base = Base::Nf4(Quantisation::Once);
        let plan = plan_in(math, config).expect("the model plans");
        let packed = plan.params.iter();
        let packed: Vec<_> = packed
            .filter(|p| matches!(p.stored, Stored::Packed { .. }))
            .collect();
        assert_eq!(packed.len(), 14);
        for param in packed {
            let spec = plan.slots.spec(param.slot);
            assert_eq!((spec.dtype, spec.role), (DType::U8, Role::Frozen));
            let elements = plan.shape_of(param).elements();
            assert_eq!(spec.shape.elements(), elements.div_ceil(2));
        }
        let scratches = plan
            .slots
            .iter()
            .filter(|(_, def)| def.view.is_none() && def.spec.name == "dequantised");
        let sizes: Vec<usize> = scratches.map(|(_, d)| d.spec.shape.elements()).collect();
        assert_eq!(sizes, [2 * 36 * 24], "gate and up are the largest");
        // Forward reads all fourteen. Backward reads them again, but for q, k and v of the lowest
        // layer, whose input needs no gradient when no adapter stands before it.
        let found = count(&plan, |op| matches!(op, Op::Dequantise(_)));
        assert_eq!(found, 14 + 11);
    }
}

#[test]
fn a_frozen_projection_is_stored_as_products_read_it_and_nothing_else() {
    for math in Math::ALL {
        let plan = plan_in(math, lora(&Projection::ALL)).expect("the model plans");
        let frozen = plan.params.iter();
        let frozen = frozen.filter(|p| p.training == Training::FrozenProduct);
        let text = "the embedding, the head and the projections";
        assert_eq!(frozen.clone().count(), 16, "{text}");
        for param in frozen {
            assert_eq!(plan.slots.spec(param.slot).dtype, math.storage());
            assert!(plan.shadow_of(param.slot, &[]).is_none(), "{}", param.name);
        }
    }
}

/// Qwen3 of four thousand million parameters, as it is published.
fn qwen3_4b() -> ModelConfig {
    ModelConfig {
        family: Family::Qwen3,
        vocab_size: 151_936,
        d_model: 2560,
        n_layers: 36,
        n_heads: 32,
        n_kv_heads: 8,
        head_dim: 128,
        d_ff: 9728,
        rope_theta: 1e6,
        rms_norm_eps: 1e-6,
        tie_embeddings: true,
        max_seq_len: 40_960,
        init_std: 0.02,
    }
}

#[test]
fn a_large_packed_base_needs_little_memory_and_one_call_a_product_to_read() {
    let lora = LoraConfig {
        rank: 16,
        base: Base::Nf4(Quantisation::Once),
        ..lora(&Projection::ALL)
    };
    let config = PlanConfig {
        math: Math::Bf16,
        ..PlanConfig::of(1, 1024)
    };
    let model = Decoder::with_adapters(qwen3_4b(), lora);
    let plan = Plan::build(&model, config).expect("the model plans");
    let base_bytes = plan.layout.role_bytes(Role::Frozen);
    assert!(base_bytes <= 3_200_000_000, "{base_bytes} bytes");
    // Codes, block maxima and the embedding cannot be less.
    let base: usize = plan
        .params
        .iter()
        .filter(|p| p.state.is_none())
        .map(|p| plan.slots.spec(p.slot).bytes())
        .sum();
    assert!(base_bytes >= base && base > 2_800_000_000, "{base} bytes");
    // Each of the four products of a layer is read forward and, but for the lowest one, backward.
    let found = count(&plan, |op| matches!(op, Op::Dequantise(_)));
    assert_eq!(found, 36 * 8 - 1);
}

#[test]
fn a_rank_of_zero_or_above_a_dimension_is_refused() {
    for (rank, targets) in [(0, [Projection::Query]), (11, [Projection::Value])] {
        let mut config = lora(&targets);
        config.rank = rank;
        let refused = plan_in(Math::F32, config).expect_err("the rank does not fit");
        assert!(
            matches!(refused, PlanError::Size { what: "lora.rank", found, .. } if found == rank)
        );
    }
}

#[test]
fn names_and_initial_values_are_those_of_peft() {
    let plan = plan(lora(&[Projection::Key]));
    let of = |which: &str| {
        let name = format!("base_model.model.model.layers.1.self_attn.k_proj.{which}.weight");
        plan.params.iter().find(|p| p.name == name).expect("named")
    };
    let (a, b) = (of("lora_A"), of("lora_B"));
    assert_eq!(plan.shape_of(a).dims(), [4, 24]);
    assert_eq!(plan.shape_of(b).dims(), [10, 4]);
    let bound = (1.0 / 24.0_f64.sqrt()) as f32;
    assert_eq!((a.init, b.init), (Init::Uniform { bound }, Init::Zeros));
    assert_eq!(Projection::of_module("lm_head"), None);
}

#[test]
fn a_base_of_the_shape_of_qwen3_4b_takes_less_than_3_2_gb_with_its_embedding() {
    let mut adapters = lora(&Projection::ALL);
    adapters.base = Base::Nf4(Quantisation::Once);
    let built = |layers: Option<usize>| {
        let form = StepForm {
            recompute: layers.into(),
            ..StepForm::default()
        };
        let config = PlanConfig {
            math: Math::Bf16,
            form,
            ..PlanConfig::of(1, 1024)
        };
        let decoder = Decoder::with_adapters(qwen3_4b(), adapters.clone());
        Plan::build(&decoder, config).expect("plans")
    };
    let (kept, anew) = (built(None), built(Some(1)));
    let weights = anew.layout.role_bytes(Role::Frozen) + anew.layout.role_bytes(Role::Scratch);
    // 3.63e9 elements in projections at 4.5 bits, 0.39e9 in the embedding at 16.
    assert!(
        (2_700_000_000..3_200_000_000).contains(&weights),
        "{weights}"
    );
    let local = |p: &Plan| p.layout.arena_bytes() - p.layout.persistent_bytes();
    assert!(
        local(&anew) * 4 < local(&kept),
        "{} of {}",
        local(&anew),
        local(&kept)
    );
    assert!(anew.layout.arena_bytes() < 4_500_000_000);
}
