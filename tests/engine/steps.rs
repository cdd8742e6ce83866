//! What a step does: replay equals eager, scalars are the step's own, bad input changes nothing.

use bitstep::data::IGNORE;
use bitstep::engine::{Hyper, Schedule, ScheduleKind, Trainer};
use bitstep::error::{DataError, GuardError, StepError};
use bitstep::op::step_values::Dropped;
use bitstep::plan::{Plan, PlanConfig};

use super::common::*;

fn roots(
    plan: &std::sync::Arc<Plan>,
    warmup_steps: u32,
    lr: impl Fn(u64) -> f64,
) -> Vec<blake3::Hash> {
    let mut trainer = trainer(plan, Hyper::default(), warmup_steps);
    (0..24)
        .map(|step| {
            trainer.set_lr(lr(step));
            let report = trainer.step(&batch(plan, step)).unwrap();
            assert_eq!((report.step, report.lr), (step, lr(step)));
            trainer.session_mut().root().unwrap()
        })
        .collect()
}

#[test]
fn a_cosine_rate_over_replays_gives_the_bits_of_eager_steps() {
    let plan = plan(PlanConfig::of(3, 10));
    let schedule = Schedule {
        kind: ScheduleKind::Cosine,
        peak: 1e-2,
        warmup: 4,
        steps: 24,
        floor: 0.1,
    };
    let eager = roots(&plan, 1000, |step| schedule.lr(step));
    let replayed = roots(&plan, 2, |step| schedule.lr(step));
    assert_eq!(eager, replayed);
    let frozen = roots(&plan, 2, |step| schedule.lr(step.min(2)));
    assert_ne!(eager, frozen, "a rate frozen at capture would show");
}

#[test]
fn the_bias_correction_of_replay_n_is_that_of_step_n() {
    let plan = plan(PlanConfig::of(1, 5));
    let mut trainer = trainer(&plan, Hyper::default(), 2);
    for step in 0..6 {
        trainer.step(&batch(&plan, step)).unwrap();
        let scalars = trainer
            .session_mut()
            .read_slot(plan.inputs.scalars)
            .unwrap();
        let expected = (1.0 / (1.0 - 0.9f64.powi(step as i32 + 1))) as f32;
        assert!(
            (scalars[1] - expected).abs() <= f32::EPSILON * expected,
            "step {step}"
        );
    }
}

#[test]
fn every_parameter_gets_a_gradient() {
    let plan = plan(PlanConfig::of(3, 10));
    let mut session = session(&plan, 2);
    session.step(&batch(&plan, 0), &Hyper::default()).unwrap();
    for param in &plan.params {
        let grad = session.read_slot(param.state.unwrap().grad).unwrap();
        assert!(
            grad.iter().any(|g| *g != 0.0),
            "{} has no gradient",
            param.name
        );
    }
}

#[test]
fn norm_weight_gradients_do_not_add_up_over_steps() {
    let plan = plan(PlanConfig::of(3, 10));
    let hyper = Hyper {
        lr: 0.0,
        weight_decay: 0.0,
        ..Hyper::default()
    };
    let mut session = session(&plan, 2);
    let mut grads = Vec::new();
    for _ in 0..3 {
        session.step(&batch(&plan, 0), &hyper).unwrap();
        grads.push(session.read_slot(plan.arenas.grad).unwrap());
    }
    assert!(
        grads.windows(2).all(|w| w[0] == w[1]),
        "nothing but the weights may matter"
    );
}

fn refused(
    trainer: &mut Trainer<bitstep::cpu::CpuBackend>,
    batch: &bitstep::data::Batch,
) -> StepError {
    let before = trainer.session_mut().snapshot().unwrap();
    let error = trainer.step(batch).unwrap_err();
    assert_eq!(
        trainer.session_mut().snapshot().unwrap(),
        before,
        "{error}: nothing may move"
    );
    error
}

#[test]
fn a_batch_that_does_not_fit_changes_nothing() {
    let plan = plan(PlanConfig::of(2, 6));
    for warm in [1, 5] {
        let mut trainer = trainer(&plan, Hyper::default(), 2);
        for step in 0..warm {
            trainer.step(&batch(&plan, step)).unwrap();
        }
        let good = batch(&plan, 9);
        let mut shape = good.clone();
        (shape.batch, shape.seq_len) = (3, 4);
        assert!(matches!(
            refused(&mut trainer, &shape),
            StepError::Batch(DataError::BatchShape { .. })
        ));
        let mut token = good.clone();
        token.input_ids[7] = VOCAB as i32;
        assert!(matches!(
            refused(&mut trainer, &token),
            StepError::Batch(DataError::InputId { .. })
        ));
        let mut target = good.clone();
        target.targets[0] = -1;
        assert!(matches!(
            refused(&mut trainer, &target),
            StepError::Batch(DataError::Target { .. })
        ));
        let mut empty = good.clone();
        empty.targets.fill(IGNORE);
        assert!(matches!(
            refused(&mut trainer, &empty),
            StepError::Hyperparameter { .. }
        ));
        trainer.set_lr(f64::NAN);
        assert!(matches!(
            refused(&mut trainer, &good),
            StepError::Hyperparameter { name: "lr", .. }
        ));
        trainer.set_lr(1e-3);
        trainer.step(&good).unwrap();
    }
}

#[test]
fn a_step_does_not_change_the_callers_batch() {
    let plan = plan(PlanConfig::of(2, 6));
    let mut trainer = trainer(&plan, Hyper::default(), 2);
    let given = batch(&plan, 0);
    for _ in 0..4 {
        trainer.step(&given).unwrap();
    }
    assert_eq!(given, batch(&plan, 0));
}

#[test]
fn a_baked_hyperparameter_cannot_change_after_capture() {
    let plan = plan(PlanConfig::of(2, 6));
    let mut trainer = trainer(&plan, Hyper::default(), 2);
    for step in 0..4 {
        trainer.step(&batch(&plan, step)).unwrap();
    }
    trainer.hyper_mut().beta2 = 0.99;
    let error = refused(&mut trainer, &batch(&plan, 4));
    assert!(
        matches!(
            error,
            StepError::Guard(GuardError::Baked { name: "beta2", .. })
        ),
        "{error}"
    );
    trainer.hyper_mut().beta2 = 0.95;
    trainer.hyper_mut().weight_decay = 0.5;
    trainer.step(&batch(&plan, 4)).unwrap();
}

#[test]
fn evaluation_between_replays_changes_no_bit_of_training() {
    let plan = plan(PlanConfig::of(3, 10));
    let mut plain = trainer(&plan, Hyper::default(), 2);
    let mut evaluated = trainer(&plan, Hyper::default(), 2);
    for step in 0..6 {
        plain.step(&batch(&plan, step)).unwrap();
        let before = evaluated.evaluate(&batch(&plan, 100)).unwrap();
        let report = evaluated.step(&batch(&plan, step)).unwrap();
        let again = evaluated.evaluate(&batch(&plan, 100)).unwrap();
        assert_ne!(
            before.loss, again.loss,
            "the step must show in the evaluation"
        );
        assert_eq!(report.step, step);
    }
    let roots = [&mut plain, &mut evaluated].map(|t| t.session_mut().root().unwrap());
    assert_eq!(roots[0], roots[1]);
}

#[test]
fn an_evaluation_gives_the_loss_of_the_step_that_follows() {
    let plan = plan(PlanConfig::of(3, 10));
    let mut trainer = trainer(&plan, Hyper::default(), 2);
    for step in 0..5 {
        let batch = batch(&plan, step);
        let evaluation = trainer.evaluate(&batch).unwrap();
        let report = trainer.step(&batch).unwrap();
        assert_eq!(evaluation.loss.to_bits(), report.loss.to_bits());
    }
}

/// Gives the embedding a value so large that the loss is not finite.
fn break_weights(trainer: &mut Trainer<bitstep::cpu::CpuBackend>, value: f32) {
    let name = "model.norm.weight";
    let mut weights = trainer.session_mut().read_param(name).unwrap();
    weights[2] = value;
    trainer.session_mut().write_param(name, &weights).unwrap();
}

#[test]
fn a_non_finite_step_changes_nothing_and_is_reported_at_its_step() {
    let plan = plan(PlanConfig::of(2, 6));
    for (warm, value) in [
        (1, f32::NAN),
        (5, f32::NAN),
        (1, f32::INFINITY),
        (5, f32::INFINITY),
    ] {
        let mut trainer = trainer(&plan, Hyper::default(), 2);
        for step in 0..warm {
            trainer.step(&batch(&plan, step)).unwrap();
        }
        break_weights(&mut trainer, value);
        let arenas = plan.arenas;
        let state = |t: &mut Trainer<_>| {
            t.session_mut()
                .digests(&[arenas.param, arenas.moment1, arenas.moment2])
                .unwrap()
        };
        let before = state(&mut trainer);
        let applied = trainer.session().progress().applied;
        let report = trainer.step(&batch(&plan, warm)).unwrap();
        assert_eq!(report.step, warm);
        assert!(!report.applied());
        assert!(
            report
                .dropped
                .intersects(Dropped::NON_FINITE_LOSS | Dropped::NON_FINITE_NORM)
        );
        assert_eq!(state(&mut trainer), before);
        assert_eq!(
            trainer.session().progress().applied,
            applied,
            "AdamW's t stands"
        );
        let bits = [report.loss, report.grad_norm].map(f32::to_bits);
        let canonical = |b: u32| !f32::from_bits(b).is_nan() || b == 0x7fc0_0000;
        assert!(
            bits.into_iter().all(canonical),
            "only the canonical NaN is reported"
        );
    }
}

#[test]
fn a_spike_is_dropped_whole_and_training_goes_on() {
    let plan = plan(PlanConfig::of(2, 6));
    let mut trainer = trainer(&plan, Hyper::default(), 2);
    for step in 0..4 {
        trainer.step(&batch(&plan, step)).unwrap();
    }
    let before = trainer.session_mut().root().unwrap();
    trainer.hyper_mut().spike_norm = Some(1e-6);
    let report = trainer.step(&batch(&plan, 4)).unwrap();
    assert_eq!(report.dropped, Dropped::SPIKE);
    assert_eq!(trainer.session_mut().root().unwrap(), before);
    let progress = trainer.session().progress();
    assert_eq!(
        (progress.taken, progress.applied),
        (5, 4),
        "the cursor moves, AdamW's t does not"
    );
    trainer.hyper_mut().spike_norm = None;
    assert!(trainer.step(&batch(&plan, 5)).unwrap().applied());
    assert_ne!(trainer.session_mut().root().unwrap(), before);
}

#[test]
fn one_token_one_sequence_steps() {
    let plan = plan(PlanConfig::of(1, 1));
    let mut trainer = trainer(&plan, Hyper::default(), 2);
    for step in 0..4 {
        assert!(trainer.step(&batch(&plan, step)).unwrap().applied());
    }
}

#[test]
fn weights_scale_the_loss_and_a_weight_of_zero_takes_a_token_out_of_the_sum() {
    let plan = plan(PlanConfig::of(2, 6));
    let mut session = session(&plan, 1);
    let mut full = batch(&plan, 0);
    full.weights.fill(1.0);
    full.normaliser = Some(8.0);
    let mut doubled = full.clone();
    doubled.weights.fill(2.0);
    let mut zeroed = full.clone();
    zeroed.weights[3] = 0.0;
    let mut ignored = full.clone();
    ignored.targets[3] = IGNORE;
    let mut loss = |b: &bitstep::data::Batch| session.evaluate(b, &Hyper::default()).unwrap().loss;
    assert_eq!(loss(&doubled), 2.0 * loss(&full));
    assert_eq!(loss(&zeroed).to_bits(), loss(&ignored).to_bits());
    assert_ne!(loss(&zeroed), loss(&full));
}

#[test]
fn a_tensor_that_does_not_exist_or_fit_is_named() {
    let plan = plan(PlanConfig::of(1, 2));
    let mut session = session(&plan, 1);
    let error = session
        .write_param("model.norm.weigth", &[1.0])
        .unwrap_err();
    assert!(
        matches!(&error, StepError::UnknownTensor { nearest, .. } if nearest == "model.norm.weight")
    );
    let error = session
        .write_param("model.norm.weight", &[1.0])
        .unwrap_err();
    assert!(matches!(
        error,
        StepError::TensorSize {
            expected: 24,
            found: 1,
            ..
        }
    ));
}
