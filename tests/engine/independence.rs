//! What the bits may not depend on: threads, SIMD path, head chunks, recapture; and what they must.

use std::sync::Arc;

use bitstep::cpu::simd::SimdPath;
use bitstep::engine::init::FreshInit;
use bitstep::engine::{Hyper, Session};
use bitstep::model::Family;
use bitstep::op::Op;
use bitstep::plan::{Plan, PlanConfig, ProgramKind};

use super::common::*;

fn root_after(plan: &Arc<Plan>, backend: bitstep::cpu::CpuBackend, steps: u64) -> blake3::Hash {
    let mut session = session_on(plan, backend);
    for step in 0..steps {
        session.step(&batch(plan, step), &Hyper::default()).unwrap();
    }
    session.root().unwrap()
}

#[test]
fn threads_and_simd_paths_decide_no_bit() {
    for family in [Family::Llama, Family::Qwen2, Family::Qwen3] {
        let model = model(family, true);
        let plan = Arc::new(Plan::build(&model, PlanConfig::of(5, 13)).unwrap());
        let expected = root_after(&plan, cpu(1), 3);
        for path in SimdPath::available() {
            for threads in [1, 2, 7, 64] {
                let found = root_after(&plan, cpu_on(path, threads), 3);
                assert_eq!(found, expected, "{family:?} on {path}, {threads} threads");
            }
        }
    }
}

#[test]
fn seeds_differ() {
    let plan = plan(PlanConfig::of(1, 4));
    let roots = [1, 2].map(|seed| {
        let mut session = Session::new(cpu(1), plan.clone()).unwrap();
        session.load(&FreshInit { seed }).unwrap();
        session.root().unwrap()
    });
    assert_ne!(roots[0], roots[1]);
}

/// With pieces of 8 tokens every chunk of 8, 16 or more rows keeps the tree over tokens.
#[test]
fn the_size_of_a_head_chunk_decides_memory_and_no_bit() {
    for (grain, tied) in [(4, false), (4, true), (1, false), (2, true)] {
        let plan_with = |rows: usize| {
            let config = PlanConfig {
                grain,
                piece_tokens: Some(8),
                chunk_logits: rows * VOCAB,
                ..PlanConfig::of(4, 26)
            };
            Arc::new(Plan::build(&model(Family::Llama, tied), config).unwrap())
        };
        let whole = plan_with(1000);
        assert_eq!(whole.logits.len(), 1);
        let expected = root_after(&whole, cpu(2), 2);
        for rows in [8, 16, 30, 52, 64] {
            let chunked = plan_with(rows);
            assert!(chunked.logits.len() > 1);
            let logits = chunked.slots.spec(chunked.logits[0].0).shape.elements();
            assert!(logits <= rows * VOCAB);
            assert_eq!(
                root_after(&chunked, cpu(2), 2),
                expected,
                "{rows} rows, grain {grain}"
            );
        }
    }
}

#[test]
fn the_grain_decides_bits_and_is_part_of_the_manifest() {
    let plans = [4, 2, 1].map(|grain| {
        plan(PlanConfig {
            grain,
            ..PlanConfig::of(4, 26)
        })
    });
    let roots = plans.each_ref().map(|p| root_after(p, cpu(1), 2));
    let manifests = plans.each_ref().map(|p| p.manifest().hash());
    assert_ne!(roots[0], roots[1]);
    assert_ne!(manifests[0], manifests[1]);
    assert_ne!(manifests[1], manifests[2]);
}

#[test]
fn a_tied_weight_gets_the_gradients_of_both_its_uses() {
    let plan = Arc::new(Plan::build(&model(Family::Llama, true), PlanConfig::of(2, 6)).unwrap());
    assert!(plan.params.iter().all(|p| p.name != "lm_head.weight"));
    let calls = plan.calls(ProgramKind::Step);
    let table = &plan.params[0];
    let stores: Vec<String> = calls
        .iter()
        .filter(|c| {
            c.writes
                .iter()
                .any(|&w| plan.slots.overlap(w, table.state.unwrap().grad))
        })
        .filter(|c| !matches!(c.op, Op::AdamW(_)))
        .map(|c| c.op.to_string())
        .collect();
    assert_eq!(stores.len(), 2, "{stores:?}");
    assert!(stores[0].contains("matmul_grad_weight") && stores[0].contains("store=assign"));
    assert!(stores[1].contains("embed_grad") && stores[1].contains("store=add"));
}

#[test]
fn a_session_starts_with_the_same_bits_whatever_was_in_memory() {
    let plan = plan(PlanConfig::of(3, 10));
    let first = root_after(&plan, cpu(2), 3);
    let litter: Vec<Vec<f32>> = (0..50).map(|_| vec![f32::NAN; 100_000]).collect();
    drop(litter);
    assert_eq!(root_after(&plan, cpu(2), 3), first);
}
