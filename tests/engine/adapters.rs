//! Adapters on gate and up, gated in their launch in a graph: the bits of the CPU and of the calls one by one.

use std::sync::Arc;

use bitstep::model::decoder::Decoder;
use bitstep::model::{Family, ModelConfig};
use bitstep::plan::{Plan, PlanConfig};
use bitstep::shape::Math;

use super::common::*;
use crate::gpu;

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
    let config_of = PlanConfig {
        math,
        ..PlanConfig::of(batch, seq_len)
    };
    let model = Decoder::with_adapters(config, on_all_projections(rank));
    Arc::new(Plan::build(&model, config_of).expect("plans"))
}

#[test]
fn a_graph_that_gates_what_adapters_leave_has_the_bits_of_the_cpu() {
    for (math, rank, sizes, expected) in [
        (Math::Bf16, 16, [3, 48], "lora_up_swiglu_bf16"),
        (Math::Bf16, 8, [1, 16], "lora_up_swiglu_bf16"),
        (Math::F16, 16, [2, 40], "lora_up_swiglu_f16"),
    ] {
        let plan = adapted(math, rank, sizes);
        let found = kernels_of_groups(&plan);
        let gated = found.iter().filter(|&&entry| entry == expected).count();
        assert_eq!(gated, 2, "{expected} in both layers: {found:?}");
        let Some(cuda) = gpu::backend() else { continue };
        assert_steps_of_the_cpu(&plan, cuda, expected);
    }
}
