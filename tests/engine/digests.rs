//! The captured digest of the parameters, and what a proof copies.

use std::sync::Arc;

use bitstep::backend::Backend;
use bitstep::engine::init::FreshInit;
use bitstep::engine::{Hyper, Session, Trainer};
use bitstep::error::{CaptureError, DeviceError, GuardError, StepError};
use bitstep::layout::Region;
use bitstep::plan::{Plan, PlanConfig};
use bitstep::shape::Role;

use super::common::*;
use super::faulty::{Faulty, Plans};

fn faulty_trainer(plans: &Plans) -> (Trainer<Faulty>, Arc<Plan>) {
    let plan = plan(PlanConfig::of(2, 6));
    let mut trainer = failing_trainer(&plan, plans);
    for step in 0..2 {
        trainer.step(&batch(&plan, step)).unwrap();
    }
    (trainer, plan)
}

/// Advances until the session is captured and not proven.
fn captured(plans: &Plans) -> (Session<Faulty>, Arc<Plan>) {
    let plan = plan(PlanConfig::of(2, 6));
    let backend = Faulty {
        cpu: cpu(1),
        plans: plans.clone(),
    };
    let (hyper, mut session) = (
        Hyper::default(),
        Session::new(backend, plan.clone()).unwrap(),
    );
    session.load(&FreshInit { seed: 3 }).unwrap();
    for step in 0..2 {
        session.step(&batch(&plan, step), &hyper).unwrap();
    }
    for _ in 0..2 {
        let (next, outcome) = session.advance(&batch(&plan, 9), &hyper);
        assert_eq!(outcome, Ok(()));
        session = next;
    }
    (session, plan)
}

/// BLAKE3 of every parameter's bytes, read back.
fn of_bytes<B: Backend>(session: &mut Session<B>, plan: &Plan) -> Vec<blake3::Hash> {
    let slots: Vec<_> = plan.params.iter().map(|p| p.slot).collect();
    let read = slots.into_iter().map(|slot| {
        let values = session.read_slot(slot).unwrap();
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        blake3::hash(&bytes)
    });
    read.collect()
}

#[test]
fn the_captured_digest_is_that_of_the_bytes_before_and_after_capture() {
    let plans = Plans::default();
    let (mut trainer, plan) = faulty_trainer(&plans);
    let session = trainer.session_mut();
    assert_eq!(session.param_digests().unwrap(), of_bytes(session, &plan));
    assert!(!plans.log.borrow().contains(&"launch_digest"));
    let states: Vec<_> = (0..3)
        .map(|_| trainer.advance(&batch(&plan, 2)).unwrap())
        .collect();
    assert_eq!(states, ["recorded", "captured", "replaying"]);
    for step in 2..5 {
        plans.log.borrow_mut().clear();
        let session = trainer.session_mut();
        assert_eq!(session.param_digests().unwrap(), of_bytes(session, &plan));
        assert_eq!(*plans.log.borrow(), ["launch_digest"]);
        trainer.step(&batch(&plan, step)).unwrap();
    }
}

#[test]
fn it_is_captured_once_and_held_against_the_plain_one() {
    let plans = Plans::default();
    let (session, plan) = captured(&plans);
    plans.digest_errs.set(true);
    let (mut session, outcome) = session.advance(&batch(&plan, 9), &Hyper::default());
    assert!(
        matches!(&outcome, Err(CaptureError::Digest { tensor, .. }) if *tensor == plan.params[0].name),
        "{outcome:?}"
    );
    assert_eq!(session.state_name(), "captured");
    let before = session.snapshot().unwrap();
    plans.digest_errs.set(false);
    let (mut session, outcome) = session.advance(&batch(&plan, 9), &Hyper::default());
    assert_eq!(outcome, Ok(()));
    assert_eq!(session.snapshot().unwrap(), before);
    plans.log.borrow_mut().clear();
    session.root().unwrap();
    session.root().unwrap();
    assert_eq!(*plans.log.borrow(), ["launch_digest"; 2]);
}

#[test]
fn a_captured_digest_of_other_regions_or_another_arena_is_refused() {
    let plans = Plans::default();
    let (mut trainer, plan) = faulty_trainer(&plans);
    trainer.step(&batch(&plan, 2)).unwrap();
    plans.digest_refused.set(true);
    let refused = trainer.session_mut().root().unwrap_err();
    assert!(
        matches!(&refused, StepError::Guard(GuardError::DigestRegions { .. })),
        "{refused}"
    );

    let backend = cpu(1);
    let mut arena = backend.allocate(&plan.layout, &[]).unwrap();
    let other = backend.allocate(&plan.layout, &[]).unwrap();
    let regions: Vec<Region> = plan
        .params
        .iter()
        .map(|p| plan.layout.region(p.slot))
        .collect();
    let graph = backend.capture_digest(&mut arena, &regions).unwrap();
    assert_eq!(backend.check_digest(&arena, &graph, &regions), Ok(()));
    let mut moved = regions.clone();
    moved[1].bytes -= 4;
    let refused = backend.check_digest(&arena, &graph, &moved).unwrap_err();
    assert!(refused.to_string().contains("region 1 at"), "{refused}");
    let refused = backend.check_digest(&other, &graph, &regions);
    assert!(matches!(refused, Err(GuardError::Arena { .. })));
    let offset = plan.layout.arena_bytes();
    let outside = Region { offset, bytes: 4 };
    assert!(matches!(
        backend.capture_digest(&mut arena, &[outside]).err(),
        Some(CaptureError::Device(DeviceError::OutOfArena { .. }))
    ));
}

#[test]
fn a_replay_that_writes_nothing_is_not_admitted() {
    let plans = Plans::default();
    let (session, plan) = captured(&plans);
    plans.graph_idles.set(true);
    let (_, outcome) = session.advance(&batch(&plan, 9), &Hyper::default());
    assert!(
        matches!(&outcome, Err(CaptureError::NotEqual { tensor, .. }) if tensor == "loss"),
        "{outcome:?}"
    );
}

#[test]
fn a_proof_copies_the_state_back_once_a_run_that_changed_it() {
    let plans = Plans::default();
    let (session, plan) = captured(&plans);
    plans.written.set(0);
    let (_, outcome) = session.advance(&batch(&plan, 9), &Hyper::default());
    assert_eq!(outcome, Ok(()));
    let roles = [Role::Param, Role::Grad, Role::Moment1, Role::Moment2];
    let state: usize = roles.iter().map(|&r| plan.layout.role_bytes(r)).sum();
    let rest = plan.layout.persistent_bytes() - state;
    let written = plans.written.get();
    assert!(written >= 2 * state, "{written} of {state}");
    assert!(written < 2 * state + 10 * rest, "{written} of {state}");
}

#[test]
fn a_filled_region_is_that_byte_and_nothing_beside_it() {
    let plan = plan(PlanConfig::of(2, 6));
    let backend = cpu(1);
    let mut arena = backend.allocate(&plan.layout, &[]).unwrap();
    let region = |offset, bytes| Region { offset, bytes };
    backend.fill(&mut arena, region(7, 5), 0xff).unwrap();
    let mut bytes = [1u8; 20];
    backend.read(&arena, region(0, 20), &mut bytes).unwrap();
    let expected: Vec<u8> = (0..20)
        .map(|i| if (7..12).contains(&i) { 255 } else { 0 })
        .collect();
    assert_eq!(bytes.as_slice(), expected);
    let beyond = region(plan.layout.arena_bytes() - 1, 2);
    let refused = backend.fill(&mut arena, beyond, 0);
    assert!(matches!(refused, Err(DeviceError::OutOfArena { .. })));
}
