//! Device faults: the engine is poisoned, names the first fault from then on, and nothing has moved.

use bitstep::engine::init::FreshInit;
use bitstep::engine::{Hyper, Trainer};
use bitstep::error::{DeviceError, StepError};
use bitstep::plan::PlanConfig;

use super::common::*;
use super::faulty::{Faulty, Plans};

fn faulty_trainer(plans: &Plans) -> (Trainer<Faulty>, std::sync::Arc<bitstep::plan::Plan>) {
    let plan = plan(PlanConfig::of(2, 6));
    let backend = Faulty {
        cpu: cpu(1),
        plans: plans.clone(),
    };
    let mut trainer = Trainer::new(backend, plan.clone(), Hyper::default(), 2).unwrap();
    trainer.load(&FreshInit { seed: 3 }).unwrap();
    (trainer, plan)
}

#[test]
fn a_failed_eager_launch_poisons_and_moves_no_counter() {
    let plans = Plans::default();
    let (mut trainer, plan) = faulty_trainer(&plans);
    trainer.step(&batch(&plan, 0)).unwrap();
    let before = trainer.session().progress();
    plans.launches_left.set(Some(7));
    let error = trainer.step(&batch(&plan, 1)).unwrap_err();
    assert!(
        matches!(&error, StepError::Device(DeviceError::Driver { .. })),
        "{error}"
    );
    assert_eq!(trainer.session().progress(), before);
    plans.launches_left.set(None);
    let later = trainer.step(&batch(&plan, 1)).unwrap_err().to_string();
    assert_eq!(
        later,
        format!("the engine is poisoned by an earlier fault: {error}")
    );
}

#[test]
fn a_failed_replay_poisons_and_moves_no_counter() {
    let plans = Plans::default();
    let (mut trainer, plan) = faulty_trainer(&plans);
    for step in 0..4 {
        trainer.step(&batch(&plan, step)).unwrap();
    }
    let before = trainer.session().progress();
    plans.graph_fails.set(true);
    let error = trainer.step(&batch(&plan, 4)).unwrap_err();
    assert!(matches!(
        error,
        StepError::Device(DeviceError::Driver { .. })
    ));
    assert_eq!(trainer.session().progress(), before);
    plans.graph_fails.set(false);
    for refused in [
        trainer.step(&batch(&plan, 4)).err(),
        trainer.evaluate(&batch(&plan, 4)).err(),
    ] {
        let error = refused.expect("poisoned");
        assert!(
            matches!(error, StepError::Device(DeviceError::Poisoned { .. })),
            "{error}"
        );
    }
}

#[test]
fn a_replay_is_launched_only_after_its_guard() {
    let plans = Plans::default();
    let (mut trainer, plan) = faulty_trainer(&plans);
    for step in 0..4 {
        trainer.step(&batch(&plan, step)).unwrap();
    }
    plans.kernels_changed.set(true);
    plans.log.borrow_mut().clear();
    trainer.step(&batch(&plan, 4)).unwrap_err();
    assert!(
        plans.log.borrow().is_empty(),
        "a refused replay may not launch"
    );
}
