//! Attention and its neighbours, served together in a graph: the bits of the CPU and of the calls one by one.

use std::sync::Arc;

use bitstep::model::decoder::Decoder;
use bitstep::model::{Family, ModelConfig};
use bitstep::plan::{Plan, PlanConfig};
use bitstep::shape::Math;

use super::common::*;
use crate::gpu;

/// A plan of two layers with heads of `head_dim` columns, shared by two, in `math`.
fn narrow_plan(
    family: Family,
    (math, head_dim): (Math, usize),
    [batch, seq_len]: [usize; 2],
) -> Arc<Plan> {
    let model = Decoder::new(ModelConfig {
        family,
        vocab_size: VOCAB,
        d_model: 24,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: 2,
        head_dim,
        d_ff: 36,
        rope_theta: 1e4,
        rms_norm_eps: 1e-6,
        tie_embeddings: false,
        max_seq_len: seq_len,
        init_std: 0.1,
    });
    let config = PlanConfig {
        math,
        ..PlanConfig::of(batch, seq_len)
    };
    Arc::new(Plan::build(&model, config).expect("plans"))
}

/// The kernels of attention that serve more than one call of the plan's step on an H200.
fn kernels(plan: &Plan) -> Vec<&'static str> {
    let mut entries = kernels_of_groups(plan);
    entries.retain(|entry| entry.contains("attention"));
    entries
}

/// Family, precision, columns of a head, sequences and their length, and a kernel that the graph must have.
const CASES: [(Family, Math, usize, [usize; 2], &str); 9] = [
    (
        Family::Llama,
        Math::Bf16,
        32,
        [3, 32],
        "attention_grads_bf16_d32",
    ),
    (
        Family::Llama,
        Math::F16,
        64,
        [2, 17],
        "attention_turned_f16_d64",
    ),
    (
        Family::Llama,
        Math::Bf16,
        128,
        [2, 24],
        "attention_grads_bf16_d128",
    ),
    (
        Family::Llama,
        Math::Tf32,
        32,
        [2, 31],
        "attention_grads_tf32_d32",
    ),
    (
        Family::Llama,
        Math::Tf32,
        128,
        [2, 70],
        "attention_grad_key_value_tf32_d128_turned",
    ),
    (
        Family::Llama,
        Math::F16,
        64,
        [2, 70],
        "attention_grad_query_f16_d64_with_delta",
    ),
    (
        Family::Llama,
        Math::Bf16,
        128,
        [1, 67],
        "attention_grad_key_value_bf16_d128_turned",
    ),
    (
        Family::Qwen3,
        Math::Bf16,
        32,
        [2, 24],
        "attention_grads_bf16_d32",
    ),
    (
        Family::Qwen3,
        Math::Bf16,
        64,
        [1, 66],
        "attention_grad_query_bf16_d64_with_delta",
    ),
];

#[test]
fn a_graph_in_which_attention_serves_its_neighbours_has_the_bits_of_the_cpu() {
    for (family, math, head_dim, sizes, expected) in CASES {
        let plan = narrow_plan(family, (math, head_dim), sizes);
        let found = kernels(&plan);
        assert!(found.contains(&expected), "{expected} is not in {found:?}");
        let Some(cuda) = gpu::backend() else { continue };
        assert_steps_of_the_cpu(&plan, cuda, expected);
    }
}

#[test]
fn warpgroups_that_serve_their_neighbours_pass_the_proof() {
    // Enough blocks for any device of Hopper's, with a last tile of eight rows; then more gradients of scores than
    // the workspace takes.
    let (kept, apart) = (["_keeping", "_d64"], ["_with_delta", "_turned"]);
    let wide = ["_keeping", "_d128"];
    for (math, head_dim, sizes, parts) in [
        (Math::Bf16, 64, [80, 200], kept),
        (Math::F16, 64, [40, 320], kept),
        (Math::F16, 128, [80, 200], wide),
        (Math::Bf16, 128, [80, 200], wide),
        (Math::Bf16, 64, [80, 640], apart),
        (Math::F16, 128, [80, 640], apart),
    ] {
        let plan = narrow_plan(Family::Llama, (math, head_dim), sizes);
        let found = kernels(&plan);
        let has = |part: &&str| {
            found
                .iter()
                .any(|entry| entry.contains("sm90a") && entry.ends_with(part))
        };
        let keeps = found
            .iter()
            .any(|entry| entry.contains("attention_grad_query_kept_"));
        assert!(parts.iter().all(has), "{found:?}");
        assert_eq!(keeps, parts != apart, "{found:?}");
        let Some(cuda) = gpu::backend() else { continue };
        let mut trainer = on_gpu(&plan, cuda);
        for step in 0..4 {
            trainer.step(&batch(&plan, step)).unwrap();
        }
        assert_eq!(trainer.session().state_name(), "replaying");
    }
}
