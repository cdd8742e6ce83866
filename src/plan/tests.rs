//! Tests of plans: every family, and the head's row chunks.

use super::*;
use crate::model::config::{Family, ModelConfig};
use crate::model::decoder::Decoder;

fn tiny(family: Family, tie_embeddings: bool, vocab_size: usize) -> Decoder {
    Decoder::new(tiny_config(family, tie_embeddings, vocab_size))
}

fn tiny_config(family: Family, tie_embeddings: bool, vocab_size: usize) -> ModelConfig {
    ModelConfig {
        family,
        vocab_size,
        d_model: 64,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 16,
        d_ff: 96,
        rope_theta: 1e4,
        rms_norm_eps: 1e-5,
        tie_embeddings,
        max_seq_len: 32,
        init_std: 0.02,
    }
}

fn config(batch: usize, seq_len: usize, grain: usize) -> PlanConfig {
    PlanConfig {
        grain,
        ..PlanConfig::of(batch, seq_len)
    }
}

#[test]
fn every_family_plans() {
    for family in [Family::Llama, Family::Qwen2, Family::Qwen3] {
        for tied in [false, true] {
            let plan = Plan::build(&tiny(family, tied, 160), config(3, 24, 3)).unwrap();
            println!("{}", plan.manifest().text());
            println!("{}", plan.layout.describe());
        }
    }
}

#[test]
fn a_large_vocabulary_is_processed_in_row_chunks() {
    let vocab = 1 << 20;
    let plan = Plan::build(&tiny(Family::Llama, false, vocab), config(5, 256, 5)).unwrap();
    let chunks: Vec<usize> = plan.logits.iter().map(|c| c.1).collect();
    assert_eq!(chunks, [0, 256, 512, 768, 1024]);
    let logits = plan.slots.spec(plan.logits[0].0).bytes();
    assert_eq!(logits, 256 * vocab * 4, "one chunk, not five");
    let merges = plan
        .calls(ProgramKind::Step)
        .iter()
        .filter(|c| matches!(c.op, crate::op::Op::TreeAdd(_)))
        .count();
    assert_eq!(
        merges, 1,
        "five leaves make four merges, of which the products of leaves do three"
    );
}

/// Rows of each chunk, merges apart from the products, and partial sums beside the gradient, of a head.
fn head(vocab_size: usize, d_model: usize, batch: usize) -> (Vec<usize>, usize, usize) {
    let decoder = Decoder::new(ModelConfig {
        d_model,
        ..tiny_config(Family::Llama, false, vocab_size)
    });
    let config = PlanConfig {
        math: crate::shape::Math::Bf16,
        ..config(batch, 1024, batch)
    };
    let plan = Plan::build(&decoder, config).unwrap();
    let mut starts: Vec<usize> = plan.logits.iter().map(|c| c.1).collect();
    starts.push(batch * 1024);
    let calls = plan.calls(ProgramKind::Step).iter();
    let merges = calls.filter(|c| matches!(c.op, crate::op::Op::TreeAdd(_)));
    let slots = plan.slots.iter();
    let partials = slots.filter(|(_, slot)| slot.spec.name.starts_with("head.partial"));
    (
        starts.windows(2).map(|w| w[1] - w[0]).collect(),
        merges.count(),
        partials.count(),
    )
}

#[test]
fn heads_of_usual_sizes_have_one_or_two_chunks_and_no_sum_beside_the_gradient() {
    assert_eq!(head(50_304, 768, 8), (vec![4096; 2], 0, 0));
    assert_eq!(head(151_936, 1024, 4), (vec![2048; 2], 0, 0));
    assert_eq!(head(32_000, 1024, 8), (vec![8192], 0, 0));
    // Four leaves need one sum beside the gradient, which two of them share.
    assert_eq!(head(151_936, 1024, 8), (vec![2048; 4], 1, 1));
}
