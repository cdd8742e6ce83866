//! A step in halves: the bits of the step as one program, and refusals that change nothing.

use std::sync::Arc;

use bitstep::cpu::CpuBackend;
use bitstep::data::{Batch, IGNORE};
use bitstep::engine::halves::BackwardOptions;
use bitstep::engine::window::Then;
use bitstep::engine::{Hyper, Session, Trainer};
use bitstep::error::{CaptureError, PlanError, StepError};
use bitstep::model::mamba::Mamba;
use bitstep::model::mamba_config::{MambaConfig, MambaFamily};
use bitstep::model::{Family, Model};
use bitstep::num;
use bitstep::num::element::{Element, F16};
use bitstep::num::logits::{LOGIT_FACTOR, LogitRow, lift};
use bitstep::num::softmax::score_weight;
use bitstep::op::Slot;
use bitstep::op::step_values::Dropped;
use bitstep::plan::{Passes, Plan, PlanConfig, StepForm};
use bitstep::shape::{DType, Math};

use super::common::*;
use super::faulty::Plans;

fn halves_of(model: &dyn Model, most_passes: u64, config: PlanConfig) -> Arc<Plan> {
    let form = StepForm {
        passes: Passes::Halves { most_passes },
        ..config.form
    };
    let config = PlanConfig { form, ..config };
    Arc::new(Plan::build(model, config).expect("plans"))
}

fn halves(tied: bool, most_passes: u64, config: PlanConfig) -> Arc<Plan> {
    halves_of(&model(Family::Qwen3, tied), most_passes, config)
}

/// Everything an update leaves, by its digests.
fn state(trainer: &mut Trainer<CpuBackend>) -> Vec<blake3::Hash> {
    let plan = trainer.session().plan().clone();
    let arenas = plan.arenas;
    let mut slots: Vec<Slot> = vec![arenas.param, arenas.grad, arenas.moment1, arenas.moment2];
    slots.extend(arenas.shadow.map(|shadow| shadow.slot));
    slots.extend(plan.inputs.loss_scale);
    trainer.session_mut().digests(&slots).unwrap()
}

fn clipped() -> BackwardOptions {
    BackwardOptions::update(Hyper::default().clip_norm, None)
}

#[test]
fn halves_with_targets_have_the_bits_of_the_step() {
    for (math, tied) in Math::ALL.into_iter().flat_map(|m| [(m, false), (m, true)]) {
        let config = PlanConfig {
            math,
            grain: 1,
            growth_interval: 3,
            ..PlanConfig::of(2, 9)
        };
        let plan = halves(tied, 1, config.clone());
        let whole = Arc::new(Plan::build(&model(Family::Qwen3, tied), config).unwrap());
        assert_eq!(plan.definition(), whole.manifest().hash());
        let mut a = trainer(&whole, Hyper::default(), 2);
        let mut b = trainer(&plan, Hyper::default(), 2);
        for step in 0..5 {
            let batch = batch(&plan, step);
            let expected = a.step(&batch).unwrap();
            let logits = b.forward(&batch).unwrap();
            assert_eq!(logits.len(), 18 * VOCAB);
            let found = b.backward_targets(&batch, &clipped()).unwrap();
            assert_eq!(found, Some(expected), "{math}, tied {tied}, step {step}");
            assert!(
                state(&mut a) == state(&mut b),
                "{math}, tied {tied}, step {step}"
            );
        }
        assert_eq!(b.session().state_name(), "replaying");
    }
}

#[test]
fn forward_gives_the_logits_of_an_evaluation() {
    let plan = halves(true, 1, PlanConfig::of(2, 9));
    let mut trainer = trainer(&plan, Hyper::default(), 2);
    for step in 0..4 {
        let batch = batch(&plan, step);
        let expected = trainer.logits(&batch).unwrap();
        assert!(trainer.forward(&batch).unwrap() == expected);
        trainer.backward_targets(&batch, &clipped()).unwrap();
    }
}

/// The gradient of the weighted cross-entropy of f32 logits, written down from its formula.
fn wide_grad(x: &[f32], target: usize, factor: f32) -> Vec<f32> {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut lanes = [0.0f32; 256];
    for (lane, &x) in lanes.iter_mut().zip(x) {
        *lane += num::exp(x - max);
    }
    let lse = max + num::log(num::lanes::fold_lanes(lanes));
    let of = |(i, &x)| {
        let p = num::exp(x - lse);
        let p = if i == target { p - 1.0 } else { p };
        p * factor
    };
    x.iter().enumerate().map(of).collect()
}

/// The same of f16 logits of one tile; rounding to f16 is left to the engine, and the loss scale.
fn narrow_grad(x: &[f32], target: usize, factor: f32) -> Vec<f32> {
    let row = LogitRow::of(x);
    let lift = lift(DType::F16);
    let of = |(i, &x)| {
        if i == target {
            return (row.probability(x) - 1.0) * factor;
        }
        let weight = score_weight(x, LOGIT_FACTOR, row.reference) * lift;
        F16::from_f32(weight).to_f32() * row.factor(factor, 1.0 / lift)
    };
    x.iter().enumerate().map(of).collect()
}

fn cross_entropy_grad(math: Math, logits: &[f32], batch: &Batch) -> Vec<f32> {
    let inv = (1.0 / batch.normaliser()) as f32;
    let rows = logits.chunks(VOCAB).enumerate();
    let of = |(row, x): (usize, &[f32])| {
        let factor = batch.weights[row] * inv;
        match (batch.targets[row], math) {
            (IGNORE, _) => vec![0.0; VOCAB],
            (target, Math::F16) => narrow_grad(x, target as usize, factor),
            (target, _) => wide_grad(x, target as usize, factor),
        }
    };
    rows.flat_map(of).collect()
}

#[test]
fn a_gradient_of_the_callers_has_the_bits_of_the_same_gradient_computed_here() {
    for math in [Math::F32, Math::F16] {
        let config = PlanConfig {
            math,
            ..PlanConfig::of(2, 9)
        };
        let plan = halves(true, 1, config);
        let [mut a, mut b] = [0, 1].map(|_| trainer(&plan, Hyper::default(), 2));
        for step in 0..4 {
            let batch = batch(&plan, step);
            a.forward(&batch).unwrap();
            a.backward_targets(&batch, &clipped()).unwrap();
            let logits = b.forward(&batch).unwrap();
            let grad = cross_entropy_grad(math, &logits, &batch);
            let options = clipped().with_loss(2.5);
            let report = b.backward_step(&grad, &options).unwrap().unwrap();
            assert_eq!((report.loss, report.step), (2.5, step));
            assert!(state(&mut a) == state(&mut b), "{math}, step {step}");
        }
    }
}

#[test]
fn accumulated_passes_have_the_bits_of_one_batch() {
    for passes in [1, 2, 3, 5] {
        let config = |batch| PlanConfig {
            grain: 2,
            ..PlanConfig::of(batch, 6)
        };
        let whole = Arc::new(Plan::build(&model(Family::Qwen3, true), config(2 * passes)).unwrap());
        let plan = halves(true, passes as u64, config(2));
        let mut a = trainer(&whole, Hyper::default(), 2);
        let mut b = trainer(&plan, Hyper::default(), 2);
        for step in 0..4 {
            let all = batch(&whole, step);
            let expected = a.step(&all).unwrap();
            let mut found = None;
            for pass in 0..passes {
                let part = all.sequences(2 * pass..2 * pass + 2);
                let options = match pass + 1 < passes {
                    true => BackwardOptions::ACCUMULATE,
                    false => clipped(),
                };
                b.forward(&part).unwrap();
                found = b.backward_targets(&part, &options).unwrap();
            }
            assert_eq!(found, Some(expected), "{passes} passes, step {step}");
            assert!(
                state(&mut a) == state(&mut b),
                "{passes} passes, step {step}"
            );
        }
    }
}

/// Does something that must be refused, and sees that nothing has changed.
fn refused<T: std::fmt::Debug>(
    trainer: &mut Trainer<CpuBackend>,
    act: impl FnOnce(&mut Trainer<CpuBackend>) -> Result<T, StepError>,
) -> StepError {
    let before = trainer.session_mut().snapshot().unwrap();
    let error = act(trainer).unwrap_err();
    let after = trainer.session_mut().snapshot().unwrap();
    assert_eq!(after, before, "{error}: nothing may move");
    error
}

#[test]
fn misuse_is_refused_and_changes_nothing() {
    let plan = halves(true, 2, PlanConfig::of(1, 6));
    for warm in [0, 4] {
        let mut trainer = trainer(&plan, Hyper::default(), 2);
        for step in 0..warm {
            trainer.forward(&batch(&plan, step)).unwrap();
            let batch = batch(&plan, step);
            trainer.backward_targets(&batch, &clipped()).unwrap();
        }
        let batch = batch(&plan, 9);
        let grad = vec![1e-3; 6 * VOCAB];
        let update = clipped();
        let error = refused(&mut trainer, |t| t.backward_step(&grad, &update));
        assert!(matches!(error, StepError::NoForward), "{error}");
        trainer.forward(&batch).unwrap();
        trainer.evaluate(&batch).unwrap();
        let error = refused(&mut trainer, |t| t.backward_targets(&batch, &update));
        assert!(matches!(error, StepError::NoForward), "{error}");
        trainer.forward(&batch).unwrap();
        for (clip_norm, spike_norm) in [(Some(1.0), None), (None, Some(9.0))] {
            let options = BackwardOptions {
                clip_norm,
                spike_norm,
                ..BackwardOptions::ACCUMULATE
            };
            let error = refused(&mut trainer, |t| t.backward_step(&grad, &options));
            let name = if clip_norm.is_some() {
                "clip_norm"
            } else {
                "spike_norm"
            };
            assert!(
                matches!(error, StepError::AccumulateOnly { option, .. } if option == name),
                "{error}"
            );
        }
        let error = refused(&mut trainer, |t| t.backward_step(&grad[1..], &update));
        assert!(matches!(error, StepError::TensorSize { .. }), "{error}");
        let mut wrong = batch.clone();
        wrong.targets[2] = VOCAB as i32;
        let error = refused(&mut trainer, |t| t.backward_targets(&wrong, &update));
        assert!(matches!(error, StepError::Batch(_)), "{error}");
        // Backward may still follow what was refused.
        let kept = trainer
            .backward_step(&grad, &BackwardOptions::ACCUMULATE)
            .unwrap();
        assert_eq!(kept, None);
        assert_eq!(trainer.session().window().unwrap().passes, 1);
        let error = refused(&mut trainer, |t| t.step(&batch));
        assert!(
            matches!(error, StepError::WindowOpen { passes: 1 }),
            "{error}"
        );
        trainer.forward(&batch).unwrap();
        let keep = BackwardOptions::ACCUMULATE;
        let error = refused(&mut trainer, |t| t.backward_step(&grad, &keep));
        assert!(
            matches!(error, StepError::WindowFull { most: 2 }),
            "{error}"
        );
        let error = refused(&mut trainer, |t| t.backward_targets(&batch, &update));
        assert!(
            matches!(error, StepError::OtherNormaliser { .. }),
            "{error}"
        );
        let report = trainer.backward_step(&grad, &update).unwrap().unwrap();
        assert_eq!((report.step, report.applied()), (warm, true));
        assert!(trainer.step(&batch).unwrap().applied());
    }
}

#[test]
fn a_plan_that_is_not_in_halves_has_none() {
    let plan = plan(PlanConfig::of(1, 6));
    let mut trainer = trainer(&plan, Hyper::default(), 2);
    let batch = batch(&plan, 0);
    let error = refused(&mut trainer, |t| t.forward(&batch));
    assert!(matches!(error, StepError::NoProgram { .. }), "{error}");
    let form = StepForm {
        passes: Passes::Halves { most_passes: 2 },
        ..StepForm::default()
    };
    let config = PlanConfig {
        grain: 1,
        form,
        ..PlanConfig::of(3, 6)
    };
    let refused = Plan::build(&model(Family::Llama, false), config);
    assert!(
        matches!(refused, Err(PlanError::Form { .. })),
        "three grains"
    );
}

#[test]
fn a_spike_and_a_loss_that_is_not_finite_drop_the_update() {
    let plan = halves(false, 1, PlanConfig::of(1, 6));
    let mut trainer = trainer(&plan, Hyper::default(), 2);
    let batch = batch(&plan, 0);
    for step in 0..3 {
        trainer.forward(&batch).unwrap();
        trainer.backward_targets(&batch, &clipped()).unwrap();
        assert_eq!(trainer.session().progress().applied, step + 1);
    }
    let before = trainer.session_mut().root().unwrap();
    let grad = vec![1e-2; 6 * VOCAB];
    let spike = BackwardOptions::update(None, Some(1e-9));
    let lost = BackwardOptions::update(None, None).with_loss(f32::NAN);
    for (options, why) in [(spike, Dropped::SPIKE), (lost, Dropped::NON_FINITE_LOSS)] {
        trainer.forward(&batch).unwrap();
        let report = trainer.backward_step(&grad, &options).unwrap().unwrap();
        assert_eq!(report.dropped, why);
        assert_eq!(trainer.session_mut().root().unwrap(), before);
    }
    let progress = trainer.session().progress();
    assert_eq!((progress.taken, progress.applied), (5, 3));
}

fn backbone() -> Mamba {
    let config = MambaConfig {
        family: MambaFamily::Mamba,
        vocab_size: 1,
        d_model: 10,
        n_layers: 2,
        expand: 2,
        d_state: 3,
        d_conv: 4,
        dt_rank: 2,
        rms_norm_eps: 1e-5,
        tie_embeddings: true,
        init_std: 0.1,
        decay: Default::default(),
    };
    Mamba::new(config).backbone_alone()
}

#[test]
fn halves_of_a_backbone_have_the_bits_of_its_step() {
    for math in [Math::F32, Math::F16] {
        let config = PlanConfig {
            math,
            ..PlanConfig::of(3, 5)
        };
        let plan = halves_of(&backbone(), 2, config.clone());
        let whole = Arc::new(Plan::build(&backbone(), config).unwrap());
        let hyper = Hyper::default();
        let mut a = session_on(&whole, cpu(1));
        let mut b = trainer(&plan, hyper, 2);
        let features: Vec<f32> = (0..150).map(|i| (i as f32 * 0.37).sin()).collect();
        for step in 0..5 {
            let expected = a.forward_features(&features, &hyper).unwrap();
            let grad: Vec<f32> = expected.iter().map(|x| x / 150.0).collect();
            let report = a.step_features(&features, &grad, &hyper).unwrap();
            let output = b.forward_half_features(&features).unwrap();
            assert!(output == expected, "{math}, step {step}");
            let found = b.backward_step(&grad, &clipped()).unwrap();
            assert_eq!(found, Some(report), "{math}, step {step}");
            let gradients = [
                a.input_gradient().unwrap(),
                b.session_mut().half_input_gradient().unwrap(),
            ];
            assert!(gradients[0] == gradients[1]);
            assert_eq!(a.root().unwrap(), b.session_mut().root().unwrap());
        }
        assert_eq!(b.session().state_name(), "replaying");
        // A step as one program has no loss of its own, whatever the halves have left.
        b.forward_half_features(&features).unwrap();
        let lost = BackwardOptions::update(None, None).with_loss(f32::NAN);
        let report = b.backward_step(&[0.1; 150], &lost).unwrap().unwrap();
        assert_eq!(report.dropped, Dropped::NON_FINITE_LOSS);
        let step = b
            .session_mut()
            .step_features(&features, &[0.1; 150], &hyper);
        let report = step.unwrap();
        assert_eq!((report.loss, report.applied()), (0.0, true));
    }
}

#[test]
fn states_that_sequences_hand_on_are_not_accumulated() {
    use bitstep::model::mamba::Windows;
    let model = backbone().with_windows(Windows::Carried);
    let plan = halves_of(&model, 2, PlanConfig::of(1, 4));
    let mut trainer = trainer(&plan, Hyper::default(), 2);
    let features = vec![0.5; 40];
    trainer.forward_half_features(&features).unwrap();
    let error = refused(&mut trainer, |t| {
        t.backward_step(&[0.1; 40], &BackwardOptions::ACCUMULATE)
    });
    assert!(matches!(error, StepError::CarriedPass), "{error}");
    let before = trainer.session_mut().recurrent_state().unwrap();
    trainer.backward_step(&[0.1; 40], &clipped()).unwrap();
    let after = trainer.session_mut().recurrent_state().unwrap();
    assert_ne!(before, after, "an update hands the states on");
    let micro = PlanConfig {
        grain: 1,
        form: StepForm {
            passes: Passes::Micro { sequences: 1 },
            ..StepForm::default()
        },
        ..PlanConfig::of(2, 4)
    };
    let refused = Plan::build(&model, micro);
    assert!(matches!(
        refused,
        Err(PlanError::Form {
            form: "micro-batches",
            ..
        })
    ));
}

#[test]
fn a_replay_that_does_nothing_is_refused_for_every_half() {
    let plan = halves(true, 4, PlanConfig::of(1, 6));
    let programs = plan.programs().iter().count() as u32;
    assert_eq!(
        programs, 10,
        "step, evaluate, forward, score, backward, two levels, apply"
    );
    for idle in 0..programs {
        let plans = Plans::default();
        let mut trainer = failing_trainer(&plan, &plans);
        for step in 0..2 {
            let batch = batch(&plan, step);
            trainer.forward(&batch).unwrap();
            trainer.backward_targets(&batch, &clipped()).unwrap();
        }
        plans.idle_launch.set(Some(idle));
        let error = trainer.forward(&batch(&plan, 2)).unwrap_err();
        assert!(
            matches!(error, StepError::Capture(CaptureError::NotEqual { .. })),
            "program {idle}: {error}"
        );
    }
}

#[test]
fn between_record_and_proof_there_is_no_half() {
    let plan = halves(false, 1, PlanConfig::of(1, 6));
    let mut session: Session<CpuBackend> = session(&plan, 1);
    let hyper = Hyper::default();
    for step in 0..2 {
        session.step(&batch(&plan, step), &hyper).unwrap();
    }
    let (mut session, outcome) = session.advance(&batch(&plan, 2), &hyper);
    outcome.unwrap();
    let error = session.forward(&batch(&plan, 2), &hyper).unwrap_err();
    assert!(
        matches!(error, StepError::NotSteppable { state: "recorded" }),
        "{error}"
    );
    assert_eq!(BackwardOptions::ACCUMULATE.then, Then::Keep);
}
