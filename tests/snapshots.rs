//! Texts that people and goldens read: a change shows in review.

use bitstep::golden::compare::{Element, FirstDifference, OpPlace, compare};
use bitstep::golden::file::{OpLine, StepLine, TensorLine};
use bitstep::golden::{GoldenFile, Verdict};
use bitstep::manifest::Manifest;
use bitstep::model::decoder::Decoder;
use bitstep::model::{Family, ModelConfig};
use bitstep::plan::{Plan, PlanConfig};
use bitstep::shape::Math;

/// One layer with grouped heads; for Qwen3 the heads are wider than the residual stream divided by them.
fn plan(family: Family, config: PlanConfig) -> Plan {
    let model = Decoder::new(ModelConfig {
        family,
        vocab_size: 11,
        d_model: 8,
        n_layers: 1,
        n_heads: 2,
        n_kv_heads: 1,
        head_dim: 6,
        d_ff: 12,
        rope_theta: 1e4,
        rms_norm_eps: 1e-6,
        tie_embeddings: family != Family::Llama,
        max_seq_len: 5,
        init_std: 0.02,
    });
    Plan::build(&model, config).expect("plans")
}

fn text_and_hash(manifest: &Manifest) -> String {
    format!("{}hash {}\n", manifest.text(), manifest.hash())
}

#[test]
fn manifest_of_llama() {
    let plan = plan(Family::Llama, PlanConfig::of(2, 5));
    insta::assert_snapshot!(text_and_hash(&plan.manifest()));
}

#[test]
fn manifest_of_qwen3_with_two_grains_and_a_tied_head() {
    let config = PlanConfig {
        grain: 1,
        ..PlanConfig::of(2, 5)
    };
    insta::assert_snapshot!(text_and_hash(&plan(Family::Qwen3, config).manifest()));
}

#[test]
fn manifest_of_qwen2_in_f16_with_a_tied_head() {
    let config = PlanConfig {
        math: Math::F16,
        ..PlanConfig::of(2, 5)
    };
    insta::assert_snapshot!(text_and_hash(&plan(Family::Qwen2, config).manifest()));
}

#[test]
fn arena_by_role() {
    insta::assert_snapshot!(plan(Family::Qwen2, PlanConfig::of(2, 5)).layout.describe());
}

fn golden() -> GoldenFile {
    let digest = |text: &str| blake3::hash(text.as_bytes());
    let hex = |text: &str| digest(text).to_hex().to_string();
    let mut golden = GoldenFile::empty("f32", hex("recipe"), hex("manifest"));
    golden.because = "first golden of the snapshot".into();
    for (step, loss) in [4.125f32, 3.5].into_iter().enumerate() {
        golden.steps.push(StepLine {
            step: step as u64,
            loss: loss.to_bits(),
            grad_norm: 0.1f32.to_bits(),
            root: digest(&format!("root {step}")),
        });
    }
    golden.tensors.push(TensorLine {
        name: "model.norm.weight".into(),
        digest: digest("norm"),
    });
    golden.ops.push(OpLine {
        step: 0,
        call: 0,
        stem: "embed".into(),
        tensor: "embed".into(),
        digest: digest("embed"),
    });
    golden
}

#[test]
fn golden_text() {
    let text = golden().to_text();
    assert_eq!(
        GoldenFile::parse(&text, "snapshot.golden").unwrap(),
        golden()
    );
    insta::assert_snapshot!(text);
}

#[test]
fn a_golden_that_compares_nothing_is_refused() {
    let mut empty = golden();
    empty.steps.clear();
    let error = GoldenFile::parse(&empty.to_text(), "empty.golden").unwrap_err();
    assert!(
        matches!(error, bitstep::error::GoldenError::Empty { .. }),
        "{error}"
    );
    for lost in [
        |g: &mut GoldenFile| g.steps.truncate(1),
        |g: &mut GoldenFile| g.tensors.clear(),
        |g: &mut GoldenFile| g.ops.clear(),
    ] {
        let mut run = golden();
        lost(&mut run);
        assert_ne!(compare(&golden(), &run), Verdict::Identical);
        assert_ne!(compare(&run, &golden()), Verdict::Identical);
    }
}

#[test]
fn a_difference_of_losses() {
    let mut run = golden();
    run.steps[1].loss += 1;
    let Verdict::Differs(difference) = compare(&golden(), &run) else {
        panic!("one bit differs");
    };
    insta::assert_snapshot!(difference.to_string());
}

#[test]
fn a_difference_that_was_located() {
    let difference = FirstDifference {
        step: Some(3),
        what: "root over parameters".into(),
        op: Some(OpPlace {
            call: 7,
            stem: "matmul_grad_weight".into(),
            kernel: "gemm avx2".into(),
        }),
        tensor: Some("grad.model.layers.0.mlp.down_proj.weight".into()),
        element: Some(Element {
            index: 1729,
            expected: 0x3f80_0000,
            found: 0x3f80_0001,
        }),
        expected: "a".repeat(64),
        found: "b".repeat(64),
        note: "found by running the step again op by op beside an independent run".into(),
    };
    insta::assert_snapshot!(difference.to_string());
}
