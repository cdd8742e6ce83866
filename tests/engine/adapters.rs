//! Adapters on gate and up, gated in their launch in a graph: the bits of the CPU and of the calls one by one.

use std::sync::Arc;

use bitstep::cuda::call::DeviceShape;
use bitstep::cuda::together::groups;
use bitstep::engine::init::FreshInit;
use bitstep::engine::{Hyper, Trainer};
use bitstep::model::decoder::Decoder;
use bitstep::model::lora::{Base, LoraConfig, Norms, Projection};
use bitstep::model::{Family, ModelConfig};
use bitstep::plan::{Plan, PlanConfig, ProgramKind};
use bitstep::shape::Math;

use super::common::*;
use crate::gpu;

const H200: DeviceShape = DeviceShape {
    multiprocessors: 132,
    shared_bytes_per_block: 232_448,
    warpgroups: true,
};

/// A plan of two layers with adapters on all projections, whose gate and up are whole strips of 64 columns.
fn adapted(math: Math, rank: usize, [batch, seq_len]: [usize; 2]) -> Arc<Plan> {
    let config = ModelConfig {
        family: Family::Qwen3,
        vocab_size: VOCAB,
        d_model: 64,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 32,
        d_ff: 320,
        rope_theta: 1e4,
        rms_norm_eps: 1e-6,
        tie_embeddings: true,
        max_seq_len: seq_len,
        init_std: 0.1,
    };
    let lora = LoraConfig {
        rank,
        alpha: 16.0,
        targets: Projection::ALL.into(),
        norms: Norms::Trained,
        base: Base::Plain,
    };
    let config_of = PlanConfig {
        math,
        ..PlanConfig::of(batch, seq_len)
    };
    let model = Decoder::with_adapters(config, lora);
    Arc::new(Plan::build(&model, config_of).expect("plans"))
}

/// The kernels of the plan's step on an H200 that serve more than one call.
fn together(plan: &Plan) -> Vec<&'static str> {
    let calls = plan.layout.place(plan.calls(ProgramKind::Step));
    let groups = groups(&calls, &H200).into_iter().flatten();
    let launches = groups.flat_map(|group| group.launches.launches);
    launches.map(|launch| launch.entry).collect()
}

#[test]
fn a_graph_that_gates_what_adapters_leave_has_the_bits_of_the_cpu() {
    for (math, rank, sizes, expected) in [
        (Math::Bf16, 16, [3, 48], "lora_up_swiglu_bf16"),
        (Math::Bf16, 8, [1, 16], "lora_up_swiglu_bf16"),
        (Math::F16, 16, [2, 40], "lora_up_swiglu_f16"),
    ] {
        let plan = adapted(math, rank, sizes);
        let found = together(&plan);
        let gated = found.iter().filter(|&&entry| entry == expected).count();
        assert_eq!(gated, 2, "{expected} in both layers: {found:?}");
        let Some(cuda) = gpu::backend() else { continue };
        let mut first = trainer(&plan, Hyper::default(), 100);
        let mut second = Trainer::new(cuda, plan.clone(), Hyper::default(), 2).expect("an arena");
        second.load(&FreshInit { seed: 3 }).expect("loads");
        for step in 0..5 {
            let batch = batch(&plan, step);
            let reports = [first.step(&batch), second.step(&batch)].map(|r| r.unwrap());
            assert_eq!(reports[0], reports[1], "{expected}, step {step}");
            let roots = (
                first.session_mut().root().unwrap(),
                second.session_mut().root().unwrap(),
            );
            assert_eq!(roots.0, roots.1, "{expected}, step {step}");
        }
        assert_eq!(second.session().state_name(), "replaying");
    }
}
