//! What a step updates, from what, and in which process.

use std::process::Command;
use std::sync::Arc;

use bitstep::engine::Hyper;
use bitstep::model::Family;
use bitstep::num::lanes::square_sum_f64;
use bitstep::op::clip::SQUARES_BLOCK;
use bitstep::plan::{Plan, PlanConfig};

use super::common::*;

/// The first moment after the first step is `(1 - beta1) · clip · grad` of the gradient that backward left.
#[test]
fn the_optimizer_reads_the_gradients_that_backward_wrote() {
    let plan = plan(PlanConfig::of(3, 10));
    for warmup_steps in [0, 4] {
        let mut trainer = trainer(&plan, Hyper::default(), 2);
        let read = |t: &mut bitstep::engine::Trainer<_>, slot| t.session_mut().read_slot(slot);
        for step in 0..warmup_steps {
            trainer.step(&batch(&plan, step)).unwrap();
        }
        let before = read(&mut trainer, plan.arenas.moment1).unwrap();
        let report = trainer.step(&batch(&plan, warmup_steps)).unwrap();
        let grad = read(&mut trainer, plan.arenas.grad).unwrap();
        let after = read(&mut trainer, plan.arenas.moment1).unwrap();
        let (beta, rest) = (0.9f64 as f32, (1.0 - 0.9f64) as f32);
        for ((m, g), found) in before.iter().zip(&grad).zip(&after) {
            let expected = beta.mul_add(*m, rest * (g * report.clip_coefficient));
            assert_eq!(found.to_bits(), expected.to_bits());
        }
        let squares: f64 = grad.chunks(SQUARES_BLOCK).map(square_sum_f64).sum();
        let norm = squares.sqrt() as f32;
        assert!((report.grad_norm - norm).abs() <= 1e-6 * norm);
    }
}

#[test]
fn every_parameter_of_every_family_moves() {
    let hyper = Hyper {
        weight_decay: 0.0,
        ..Hyper::default()
    };
    for family in Family::ALL {
        for tied in [false, true] {
            let model = model(family, tied);
            let plan = Arc::new(Plan::build(&model, PlanConfig::of(3, 10)).unwrap());
            let biases = plan.params.iter().filter(|p| p.name.ends_with("proj.bias"));
            let norms = plan
                .params
                .iter()
                .filter(|p| p.name.ends_with("q_norm.weight"));
            assert_eq!(biases.count(), if family == Family::Qwen2 { 6 } else { 0 });
            assert_eq!(norms.count(), if family == Family::Qwen3 { 2 } else { 0 });
            let mut session = session(&plan, 2);
            let before = session.param_digests().unwrap();
            session.step(&batch(&plan, 0), &hyper).unwrap();
            let after = session.param_digests().unwrap();
            for ((param, before), after) in plan.params.iter().zip(before).zip(after) {
                assert_ne!(before, after, "{family:?}: {} stands still", param.name);
            }
        }
    }
}

/// The manifest and the root after some replays, as one process prints them.
#[test]
#[ignore = "runs as a child of the test below"]
fn one_process() {
    let plan = plan(PlanConfig::of(2, 9));
    let mut trainer = trainer(&plan, Hyper::default(), 2);
    for step in 0..5 {
        trainer.step(&batch(&plan, step)).unwrap();
    }
    let manifest = plan.manifest().hash();
    println!(
        "outcome {manifest} {}",
        trainer.session_mut().root().unwrap()
    );
}

#[test]
fn twenty_fresh_processes_give_one_manifest_and_one_root() {
    let program = std::env::current_exe().unwrap();
    let child = || {
        let mut command = Command::new(&program);
        command.args([
            "--ignored",
            "--exact",
            "engine::updates::one_process",
            "--nocapture",
        ]);
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let start = text.find("outcome ").expect("the child prints its outcome");
        text[start..].lines().next().unwrap().to_owned()
    };
    let first = child();
    assert_eq!(first.len(), "outcome ".len() + 64 + 1 + 64);
    for _ in 1..20 {
        assert_eq!(child(), first);
    }
}
