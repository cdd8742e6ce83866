//! Adapters and what a graph serves with them: the bits of the CPU and of the calls one by one.

use std::sync::Arc;

use bitstep::cuda::call::DeviceShape;
use bitstep::cuda::together::groups;
use bitstep::engine::init::FreshInit;
use bitstep::engine::{Hyper, Trainer};
use bitstep::model::decoder::Decoder;
use bitstep::model::lora::{Base, LoraConfig, Norms, Projection};
use bitstep::model::{Family, ModelConfig};
use bitstep::num::nf4::Quantisation;
use bitstep::plan::{Plan, PlanConfig, ProgramKind, StepForm};
use bitstep::shape::Math;

use super::common::*;
use crate::gpu;

const H200: DeviceShape = DeviceShape {
    multiprocessors: 132,
    shared_bytes_per_block: 232_448,
    warpgroups: true,
};

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

/// Launches of the step that serve the adapters of gate and up with SwiGLU.
fn gated(plan: &Plan) -> usize {
    let calls = plan.layout.place(plan.calls(ProgramKind::Step));
    let groups = groups(&calls, &H200).into_iter().flatten();
    let launches = groups.flat_map(|group| group.launches.launches);
    launches
        .filter(|launch| launch.entry.starts_with("lora_up_swiglu"))
        .count()
}

#[test]
fn a_graph_in_which_adapters_are_gated_at_once_has_the_bits_of_the_cpu() {
    let cases = [
        (Math::Bf16, 16, None, 2),
        (Math::Bf16, 24, Some(1), 4),
        (Math::F16, 8, Some(1), 4),
        (Math::Bf16, 6, None, 0),
        (Math::Tf32, 8, None, 0),
    ];
    for (math, rank, layers, expected) in cases {
        let plan = adapted(math, rank, layers);
        assert_eq!(gated(&plan), expected, "{math}, rank {rank}");
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
