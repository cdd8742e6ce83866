use std::ops::Range;

use super::*;
use crate::model::decoder::Decoder;
use crate::model::lora::{Base, LoraConfig, Norms, Projection};
use crate::model::{Family, ModelConfig};
use crate::op::Op;
use crate::shape::Math;

fn config(family: Family) -> ModelConfig {
    ModelConfig {
        family,
        vocab_size: 50,
        d_model: 24,
        n_layers: 2,
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

fn adapted() -> Decoder {
    let lora = LoraConfig {
        rank: 3,
        alpha: 6.0,
        targets: Projection::ALL.to_vec(),
        norms: Norms::Frozen,
        base: Base::Plain,
    };
    Decoder::with_adapters(config(Family::Llama), lora)
}

fn plan_config() -> PlanConfig {
    PlanConfig {
        math: Math::Bf16,
        ..PlanConfig::of(2, 11)
    }
}

/// The plan with the calls of the first layer that `again` names, and the stems of that layer's units.
fn with(
    decoder: &Decoder,
    again: impl Fn(&Op) -> Again,
) -> Result<(Built, Vec<&'static str>), PlanError> {
    let kept = build::plan(decoder, plan_config(), None, Chosen::Layers(None))?;
    let calls = &kept.plan.calls(ProgramKind::Step)[kept.layers[0].clone()];
    let bounds = schedule::unit_bounds(&kept.plan.slots, calls).into_iter();
    let last = |unit: Range<usize>| &calls[unit.end - 1].op;
    let chosen: Vec<Again> = bounds.clone().map(|unit| again(last(unit))).collect();
    let stems = bounds.map(|unit| last(unit).rule().stem()).collect();
    let built = build::plan(
        decoder,
        plan_config(),
        None,
        Chosen::Units(&[chosen, Vec::new()]),
    )?;
    Ok((built, stems))
}

fn called(op: &Op, stems: &[&str]) -> Again {
    match stems.contains(&op.rule().stem()) {
        true => Again::Called,
        false => Again::Kept,
    }
}

#[test]
fn an_updating_call_stands_again_only_with_the_call_whose_output_it_updates() {
    let refused = |decoder: &Decoder, stems: &[&str]| match with(decoder, |op| called(op, stems)) {
        Err(PlanError::Again { op, tensor, .. }) => (op, tensor),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("{stems:?} give other bits and are not refused"),
    };
    let llama = Decoder::new(config(Family::Llama));
    let qkv = ("matmul", "layers.0.qkv".to_owned());
    assert_eq!(refused(&llama, &["rope"]), qkv);
    assert_eq!(refused(&adapted(), &["rope", "lora_up"]), qkv);
    // The product without the update that follows it.
    let qkv = ("rope", "layers.0.qkv".to_owned());
    assert_eq!(refused(&llama, &["matmul"]), qkv);
    assert!(with(&llama, |op| called(op, &["rope", "matmul"])).is_ok());
}

/// What attention reads has been rotated in place: only what was computed again itself may be rotated again.
#[test]
fn a_call_whose_input_has_changed_since_does_not_stand_again() {
    let mut program = crate::program::ProgramBuilder::of(Math::F32);
    let [x, y, z] = ["x", "y", "z"].map(|name| program.activation(name, [4]));
    program.call(crate::op::copy::Copy { elements: 4 }, vec![x], vec![y]);
    let add = crate::op::tree_add::TreeAdd { elements: 4 };
    program.call(add, vec![z], vec![x]);
    let body = std::mem::take(&mut program.calls);
    let stretch = crate::grad::recompute::Stretch {
        calls: 0..1,
        again: vec![Again::Called],
    };
    let cut = plan_config().cut();
    let mut grads = crate::grad::GradBuilder::new(&mut program, cut, (z, z));
    let refused = grads.backward_recomputed(&body, &[stretch]).unwrap_err();
    let expected = PlanError::Again {
        op: "copy",
        tensor: "x".to_owned(),
        expected: "inputs that stay as they were",
    };
    assert_eq!(refused, expected);
}

#[test]
fn an_op_without_an_output_that_follows_from_another_is_refused() {
    let llama = Decoder::new(config(Family::Llama));
    let again = |op: &Op| match op {
        Op::Attention(_) => Again::FromOwnOutput,
        _ => Again::Kept,
    };
    let refused = with(&llama, again).err().expect("no such call");
    assert!(
        matches!(
            refused,
            PlanError::Again {
                op: "attention",
                ..
            }
        ),
        "{refused}"
    );
}

/// The norm of a kept sum is called without the addition, directly before the first call that reads it.
#[test]
fn what_stands_again_stands_directly_before_its_first_reader() {
    let llama = Decoder::new(config(Family::Llama));
    let norms = |op: &Op| match op {
        Op::RmsNorm(op) if op.residual => Again::FromOwnOutput,
        _ => Again::Kept,
    };
    let (built, stems) = with(&llama, norms).unwrap();
    assert_eq!(stems[0], "rms_norm");
    let calls = built.plan.calls(ProgramKind::Step);
    let at = calls
        .iter()
        .rposition(|call| matches!(call.op, Op::RmsNorm(_)))
        .expect("a norm");
    assert!(matches!(&calls[at].op, Op::RmsNorm(op) if !op.residual));
    assert!(at > built.body);
    assert!(calls[at + 1].reads.contains(&calls[at].writes[0]));
    let slots = &built.plan.slots;
    assert_eq!(
        slots.spec(calls[at].writes[0]).name,
        "again.layers.0.mlp_norm"
    );
    assert_eq!(
        slots.spec(calls[at].reads[0]).name,
        "layers.0.mlp_norm.residual"
    );
}

#[test]
fn the_steps_of_a_layer_keep_less_and_less_at_a_dearer_and_dearer_byte() {
    for decoder in [Decoder::new(config(Family::Qwen3)), adapted()] {
        let kept = build::plan(&decoder, plan_config(), None, Chosen::Layers(None)).unwrap();
        let steps = Steps::of(&kept);
        assert_eq!(steps.layers.len(), 2);
        for options in &steps.layers {
            assert!(options.len() > 4, "{options:?}");
            assert!(options[0].again.iter().all(|&a| a == Again::Kept));
            let prices = options.windows(2).map(|pair| {
                let saved = pair[0].kept_bytes.checked_sub(pair[1].kept_bytes);
                let saved = saved.filter(|&s| s > 0).expect("less is kept");
                assert!(pair[1].seconds > pair[0].seconds);
                (pair[1].seconds - pair[0].seconds) / saved as f64
            });
            let prices: Vec<f64> = prices.collect();
            assert!(prices.is_sorted(), "{prices:?}");
        }
        let order = &steps.order;
        assert!(order.is_sorted_by(|a, b| a.price <= b.price));
        // Every prefix can be planned.
        for count in 0..=order.len() {
            let (chosen, chunk_logits) = steps.first(count);
            assert_eq!(chunk_logits, None, "its head has few rows");
            let built = build::plan(&decoder, plan_config(), None, Chosen::Units(&chosen));
            assert!(built.is_ok(), "{count}: {:?}", built.err());
        }
    }
}

#[test]
fn a_head_of_many_rows_is_cut_into_no_more_chunks_than_can_be_planned() {
    let chunks = |batch| {
        let config = PlanConfig::of(batch, 64);
        let kept = build::plan(&adapted(), config, None, Chosen::Layers(None)).unwrap();
        let vocab_size = kept.frozen_head.expect("a frozen head").vocab_size;
        let (chunks, steps) = halvings(&kept);
        assert_eq!(chunks.len(), steps.len());
        let least = chunks.last().expect("a chunk") / vocab_size;
        (least, (batch * 64).div_ceil(least))
    };
    assert_eq!(chunks(1 << 6), (512, 8));
    assert_eq!(chunks(1 << 18), (4096, 4096));
}
