//! Large products, alone and with the sums of adapters in one launch of a graph: the bits of the CPU and of the calls one
//! by one.

use std::sync::Arc;

use bitstep::model::decoder::Decoder;
use bitstep::model::{Family, ModelConfig};
use bitstep::plan::{Plan, PlanConfig};
use bitstep::shape::Math;

use super::common::*;
use crate::gpu;

/// A layer whose products fill more than half of a large device with tiles, perhaps with adapters on all projections.
fn layer(math: Math, rank: Option<usize>) -> Arc<Plan> {
    let config = ModelConfig {
        family: Family::Llama,
        vocab_size: VOCAB,
        d_model: 256,
        n_layers: 1,
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 64,
        d_ff: 768,
        rope_theta: 1e4,
        rms_norm_eps: 1e-6,
        tie_embeddings: true,
        max_seq_len: 256,
        init_std: 0.1,
    };
    let plan_config = PlanConfig {
        math,
        ..PlanConfig::of(18, 256)
    };
    let model = match rank {
        Some(rank) => Decoder::with_adapters(config, on_all_projections(rank)),
        None => Decoder::new(config),
    };
    Arc::new(Plan::build(&model, plan_config).expect("plans"))
}

#[test]
fn a_graph_whose_products_go_on_with_adapters_has_the_bits_of_the_cpu() {
    for (math, rank) in [(Math::Bf16, 16), (Math::F16, 32), (Math::Bf16, 32)] {
        let plan = layer(math, Some(rank));
        let found = kernels_of_groups(&plan);
        for part in ["sm90a_lora_up_", "sm90a_lora_down_"] {
            assert!(
                found.iter().any(|entry| entry.contains(part)),
                "{part}: {found:?}"
            );
        }
        let Some(cuda) = gpu::backend() else { continue };
        assert_steps_of_the_cpu(&plan, cuda, &format!("{math} {rank}"));
    }
}

#[test]
fn a_graph_of_large_products_has_the_bits_of_the_cpu() {
    for math in [Math::Bf16, Math::F16] {
        let Some(cuda) = gpu::backend() else { continue };
        assert_steps_of_the_cpu(&layer(math, None), cuda, math.name());
    }
}
