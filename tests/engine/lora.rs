//! Adapters whose rows are read by 16 bytes: the bits of the CPU in a graph.

use std::sync::Arc;

use bitstep::engine::init::FreshInit;
use bitstep::engine::{Hyper, Trainer};
use bitstep::model::decoder::Decoder;
use bitstep::model::lora::{Base, LoraConfig, Norms, Projection};
use bitstep::model::{Family, ModelConfig};
use bitstep::num::nf4::Quantisation;
use bitstep::plan::{Plan, PlanConfig, StepForm};
use bitstep::shape::Math;

use super::common::*;
use crate::gpu;

/// Two layers whose rows are whole chunks of 16 bytes, with adapters of `rank` beside them.
fn adapted(math: Math, rank: usize, recompute_layers: Option<usize>) -> Arc<Plan> {
    let model = ModelConfig {
        family: Family::Qwen3,
        vocab_size: VOCAB,
        d_model: 32,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 16,
        d_ff: 40,
        rope_theta: 1e4,
        rms_norm_eps: 1e-6,
        tie_embeddings: true,
        max_seq_len: 64,
        init_std: 0.1,
    };
    let lora = LoraConfig {
        rank,
        alpha: 12.0,
        targets: Projection::ALL.to_vec(),
        norms: Norms::Frozen,
        base: Base::Nf4(Quantisation::Double),
    };
    let form = StepForm {
        recompute_layers,
        ..StepForm::default()
    };
    let config = PlanConfig {
        math,
        form,
        ..PlanConfig::of(3, 23)
    };
    Arc::new(Plan::build(&Decoder::with_adapters(model, lora), config).expect("plans"))
}

#[test]
fn a_graph_beside_a_doubly_quantised_base_has_the_bits_of_the_cpu() {
    let cases = [
        (Math::Bf16, 16, None),
        (Math::Bf16, 24, Some(1)),
        (Math::F16, 8, Some(1)),
        (Math::Bf16, 6, None),
        (Math::Tf32, 8, None),
    ];
    for (math, rank, layers) in cases {
        let plan = adapted(math, rank, layers);
        let Some(cuda) = gpu::backend() else { continue };
        let mut second = Trainer::new(cuda, plan.clone(), Hyper::default(), 2).expect("an arena");
        second.load(&FreshInit { seed: 3 }).expect("loads");
        let mut first = trainer(&plan, Hyper::default(), 100);
        for step in 0..5 {
            let batch = batch(&plan, step);
            let reports = [first.step(&batch), second.step(&batch)].map(|r| r.unwrap());
            assert_eq!(reports[0], reports[1], "{math}, rank {rank}, step {step}");
            let roots = (
                first.session_mut().root().unwrap(),
                second.session_mut().root().unwrap(),
            );
            assert_eq!(roots.0, roots.1, "{math}, rank {rank}, step {step}");
        }
        assert_eq!(second.session().state_name(), "replaying");
    }
}
