//! Tests of plans: every family, and the head's row chunks.

use super::*;
use crate::model::config::{Family, ModelConfig};
use crate::model::decoder::Decoder;

fn tiny(family: Family, tie_embeddings: bool, vocab_size: usize) -> Decoder {
    Decoder::new(ModelConfig {
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
    })
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
    assert_eq!(logits, 256 * vocab * 4, "one chunk of 1 GiB, not five");
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
