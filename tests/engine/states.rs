//! The life cycle: what each state allows, and that a refused transition changes nothing.

use bitstep::backend::Backend;
use bitstep::engine::init::FreshInit;
use bitstep::engine::{Engine, Hyper, Session};
use bitstep::error::{CaptureError, GuardError, StepError};
use bitstep::op::Slot;
use bitstep::plan::PlanConfig;

use super::common::*;
use super::faulty::{Faulty, Plans};

fn faulty_session(plans: &Plans) -> (Session<Faulty>, std::sync::Arc<bitstep::plan::Plan>) {
    let plan = plan(PlanConfig::of(2, 6));
    let backend = Faulty {
        cpu: cpu(1),
        plans: plans.clone(),
    };
    let mut session = Session::new(backend, plan.clone()).unwrap();
    session.load(&FreshInit { seed: 3 }).unwrap();
    (session, plan)
}

/// Two eager steps, then record.
fn recorded(plans: &Plans) -> (Session<Faulty>, std::sync::Arc<bitstep::plan::Plan>) {
    let (mut session, plan) = faulty_session(plans);
    for step in 0..2 {
        session
            .step(&batch(&plan, step), &Hyper::default())
            .unwrap();
    }
    let (session, outcome) = session.advance(&batch(&plan, 9), &Hyper::default());
    assert_eq!(outcome, Ok(()));
    assert_eq!(session.state_name(), "recorded");
    (session, plan)
}

#[test]
fn recording_needs_two_eager_steps() {
    let plan = plan(PlanConfig::of(2, 6));
    let mut engine = Engine::new(cpu(1), plan.clone()).unwrap();
    for steps in 0..2 {
        let refused = engine.record().err().expect("too few steps");
        let expected = CaptureError::TooFewWarmupSteps {
            expected: 2,
            found: steps,
        };
        assert_eq!(refused.reason, expected);
        engine = refused.engine;
        assert_eq!(
            engine.warmup_steps(),
            steps,
            "the engine is given back unchanged"
        );
        engine.step(&batch(&plan, 0), &Hyper::default()).unwrap();
    }
    assert!(engine.record().is_ok());
}

#[test]
fn between_record_and_proof_there_is_no_step() {
    let (mut session, plan) = recorded(&Plans::default());
    let hyper = Hyper::default();
    for state in ["recorded", "captured"] {
        let before = session.root().unwrap();
        let refused = session.step(&batch(&plan, 2), &hyper).unwrap_err();
        assert!(matches!(refused, StepError::NotSteppable { state: s } if s == state));
        assert_eq!(session.root().unwrap(), before);
        session = session.advance(&batch(&plan, 9), &hyper).0;
    }
    assert_eq!(session.state_name(), "replaying");
}

#[test]
fn a_failed_capture_leaves_a_session_that_can_be_captured_again() {
    let plans = Plans::default();
    let (session, plan) = recorded(&plans);
    plans.capture_fails.set(true);
    let (session, outcome) = session.advance(&batch(&plan, 9), &Hyper::default());
    assert_eq!(outcome, Err(CaptureError::MemoryNodes { found: 2 }));
    assert_eq!(session.state_name(), "recorded");
    plans.capture_fails.set(false);
    let (session, outcome) = session.advance(&batch(&plan, 9), &Hyper::default());
    assert_eq!(outcome, Ok(()));
    assert_eq!(session.state_name(), "captured");
}

#[test]
fn a_replay_with_other_bits_is_not_admitted_and_is_undone() {
    let plans = Plans::default();
    let (session, plan) = recorded(&plans);
    let hyper = Hyper::default();
    let (mut session, _) = session.advance(&batch(&plan, 9), &hyper);
    let before = (session.root().unwrap(), session.progress());
    let last = plan.params.last().unwrap();
    plans
        .graph_flips
        .set(Some(plan.layout.region(last.slot).offset));
    let (mut session, outcome) = session.advance(&batch(&plan, 9), &hyper);
    let Err(CaptureError::NotEqual { tensor, .. }) = outcome else {
        panic!("expected a refused proof, found {outcome:?}");
    };
    assert_eq!(tensor, last.name);
    assert_eq!(session.state_name(), "captured");
    assert_eq!((session.root().unwrap(), session.progress()), before);
    plans.graph_flips.set(None);
    let (session, outcome) = session.advance(&batch(&plan, 9), &hyper);
    assert_eq!(outcome, Ok(()));
    assert_eq!(session.state_name(), "replaying");
}

#[test]
fn a_proof_changes_no_bit_and_no_counter() {
    let (session, plan) = recorded(&Plans::default());
    let hyper = Hyper::default();
    let (mut session, _) = session.advance(&batch(&plan, 9), &hyper);
    let before = session.snapshot().unwrap();
    let (mut session, outcome) = session.advance(&batch(&plan, 9), &hyper);
    assert_eq!(outcome, Ok(()));
    assert_eq!(session.snapshot().unwrap(), before);
}

#[test]
fn a_dropped_step_proves_nothing() {
    let (session, plan) = recorded(&Plans::default());
    let (session, _) = session.advance(&batch(&plan, 9), &Hyper::default());
    let spiked = Hyper {
        spike_norm: Some(1e-9),
        ..Hyper::default()
    };
    let (session, outcome) = session.advance(&batch(&plan, 9), &spiked);
    assert!(
        matches!(outcome, Err(CaptureError::ProofStepDropped { .. })),
        "{outcome:?}"
    );
    assert_eq!(session.state_name(), "captured");
}

#[test]
fn a_proof_batch_that_does_not_fit_is_told_as_such() {
    let (session, plan) = recorded(&Plans::default());
    let (session, _) = session.advance(&batch(&plan, 9), &Hyper::default());
    let mut wrong = batch(&plan, 9);
    wrong.input_ids[3] = VOCAB as i32;
    let (_, outcome) = session.advance(&wrong, &Hyper::default());
    assert!(
        matches!(outcome, Err(CaptureError::ProofBatch { .. })),
        "{outcome:?}"
    );
}

#[test]
fn thaw_returns_to_warm_up_with_the_same_weights() {
    let plan = plan(PlanConfig::of(2, 6));
    let mut trainer = trainer(&plan, Hyper::default(), 2);
    for step in 0..4 {
        trainer.step(&batch(&plan, step)).unwrap();
    }
    assert_eq!(trainer.session().state_name(), "replaying");
    let before = trainer.session_mut().snapshot().unwrap();
    trainer.thaw();
    assert_eq!(trainer.session().state_name(), "warm-up");
    assert_eq!(trainer.session_mut().snapshot().unwrap(), before);
    for step in 4..8 {
        trainer.step(&batch(&plan, step)).unwrap();
    }
    assert_eq!(trainer.session().state_name(), "replaying");
}

#[test]
fn changed_kernels_trip_the_guard_and_nothing_moves() {
    let plans = Plans::default();
    let (session, plan) = recorded(&plans);
    let hyper = Hyper::default();
    let (session, _) = session.advance(&batch(&plan, 9), &hyper);
    let (mut session, _) = session.advance(&batch(&plan, 9), &hyper);
    session.step(&batch(&plan, 2), &hyper).unwrap();
    let before = session.snapshot().unwrap();
    plans.kernels_changed.set(true);
    let refused = session.step(&batch(&plan, 3), &hyper).unwrap_err();
    assert!(
        matches!(refused, StepError::Guard(GuardError::Kernels { .. })),
        "{refused}"
    );
    let refused = session.evaluate(&batch(&plan, 3), &hyper).unwrap_err();
    assert!(
        matches!(refused, StepError::Guard(GuardError::Kernels { .. })),
        "{refused}"
    );
    assert_eq!(session.snapshot().unwrap(), before);
    plans.kernels_changed.set(false);
    session.step(&batch(&plan, 3), &hyper).unwrap();
}

#[test]
fn a_graph_of_another_arena_is_refused() {
    let plan = plan(PlanConfig::of(2, 6));
    let backend = cpu(1);
    let calls = plan
        .layout
        .place(plan.calls(bitstep::plan::ProgramKind::Evaluate));
    let mut first = backend.allocate(&plan.layout, &[]).unwrap();
    let second = backend.allocate(&plan.layout, &[]).unwrap();
    let graph = backend.capture(&mut first, &calls).unwrap();
    assert_eq!(backend.check_graph(&first, &graph), Ok(()));
    let refused = backend.check_graph(&second, &graph).unwrap_err();
    assert!(matches!(refused, GuardError::Arena { .. }));
}

#[test]
fn a_call_outside_the_arena_is_refused_at_capture() {
    let plan = plan(PlanConfig::of(2, 6));
    let backend = cpu(1);
    let mut arena = backend.allocate(&plan.layout, &[]).unwrap();
    let mut calls = plan
        .layout
        .place(plan.calls(bitstep::plan::ProgramKind::Step));
    calls[5].writes[0].offset = plan.layout.arena_bytes();
    let refused = backend.capture(&mut arena, &calls).err();
    assert!(
        matches!(refused, Some(CaptureError::Call { call: 5, .. })),
        "{refused:?}"
    );
}

#[test]
fn everything_can_be_dropped_in_every_order() {
    let plan = plan(PlanConfig::of(2, 6));
    let backend = cpu(1);
    let calls = plan
        .layout
        .place(plan.calls(bitstep::plan::ProgramKind::Evaluate));
    for order in 0..6 {
        let mut arena = backend.allocate(&plan.layout, &[]).unwrap();
        let graph = backend.capture(&mut arena, &calls).unwrap();
        let engine = Engine::new(backend.clone(), plan.clone()).unwrap();
        match order {
            0 => {
                drop(graph);
                drop(arena);
                drop(engine);
            }
            1 => {
                drop(graph);
                drop(engine);
                drop(arena);
            }
            2 => {
                drop(arena);
                drop(graph);
                drop(engine);
            }
            3 => {
                drop(arena);
                drop(engine);
                drop(graph);
            }
            4 => {
                drop(engine);
                drop(graph);
                drop(arena);
            }
            _ => {
                drop(engine);
                drop(arena);
                drop(graph);
            }
        }
    }
}

#[test]
fn moments_are_zero_at_construction() {
    let plan = plan(PlanConfig::of(2, 6));
    let mut session = session(&plan, 1);
    for arena in [plan.arenas.moment1, plan.arenas.moment2, plan.arenas.grad] {
        let slot: Slot = arena;
        assert!(
            session
                .read_slot(slot)
                .unwrap()
                .iter()
                .all(|x| x.to_bits() == 0)
        );
    }
}
