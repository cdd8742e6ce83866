//! The numeric domains of tensor cores as whole steps: shadows, the loss scale, and what bits may not
//! depend on.

use std::sync::Arc;

use bitstep::cpu::CpuBackend;
use bitstep::cpu::simd::SimdPath;
use bitstep::data::Batch;
use bitstep::engine::{Hyper, Session, Trainer};
use bitstep::model::Family;
use bitstep::num::element::{decode, encode};
use bitstep::op::step_values::{Dropped, LossScale};
use bitstep::plan::{Plan, PlanConfig};
use bitstep::shape::{DType, Math};

use super::common::*;

const NARROW: [Math; 3] = [Math::Tf32, Math::Bf16, Math::F16];

fn plan_in(math: Math, family: Family, tied: bool) -> Arc<Plan> {
    let config = PlanConfig {
        grain: 1,
        math,
        growth_interval: 4,
        ..PlanConfig::of(2, 9)
    };
    Arc::new(Plan::build(&model(family, tied), config).expect("plans"))
}

fn scored(plan: &Plan, step: u64) -> Batch {
    batch(plan, step)
}

/// The bytes of the shadow arena, and what they must be: the parameters, rounded.
fn shadows(plan: &Plan, session: &mut Session<CpuBackend>) -> [Vec<u8>; 2] {
    let shadow = plan.arenas.shadow.expect("a narrow storage has a shadow");
    let snapshot = session.snapshot().expect("a snapshot");
    let bytes = |slot| {
        let region = plan.layout.region(slot);
        snapshot.region(region).expect("persistent").to_vec()
    };
    let params = decode(DType::F32, &bytes(plan.arenas.param)).expect("floats");
    let storage = plan.config.math.storage();
    let shadowed = plan.slots.spec(shadow.slot).shape.elements();
    let params = &params[shadow.first..shadow.first + shadowed];
    [
        bytes(shadow.slot),
        encode(storage, params).expect("a narrow float"),
    ]
}

#[test]
fn every_family_trains_in_every_domain_near_the_losses_of_f32() {
    for (family, tied) in [
        (Family::Llama, true),
        (Family::Qwen2, false),
        (Family::Qwen3, true),
    ] {
        let losses = |math| -> Vec<f32> {
            let plan = plan_in(math, family, tied);
            let mut trainer = trainer(&plan, Hyper::default(), 2);
            let steps = (0..6).map(|step| trainer.step(&scored(&plan, step % 2)).unwrap());
            let losses = steps
                .map(|report| {
                    assert!(report.applied(), "{math}: {report:?}");
                    report.loss
                })
                .collect();
            assert_eq!(trainer.session().state_name(), "replaying");
            losses
        };
        let exact = losses(Math::F32);
        assert!(exact[4] < exact[0]);
        for math in NARROW {
            let found = losses(math);
            assert_ne!(found, exact, "{math} must not be f32 itself");
            for (found, exact) in found.iter().zip(&exact) {
                let difference = (found - exact).abs() / exact;
                assert!(difference < 0.01, "{family:?} in {math}: {difference}");
            }
        }
    }
}

#[test]
fn threads_and_simd_paths_decide_no_bit_of_a_tensor_core_domain() {
    for math in NARROW {
        let plan = plan_in(math, Family::Qwen3, false);
        let root = |path, threads| {
            let mut session = session_on(&plan, cpu_on(path, threads));
            for step in 0..2 {
                session
                    .step(&scored(&plan, step), &Hyper::default())
                    .unwrap();
            }
            session.root().unwrap()
        };
        let expected = root(SimdPath::Scalar, 1);
        for path in SimdPath::available() {
            for threads in [1, 3] {
                assert_eq!(root(path, threads), expected, "{math} on {path}, {threads}");
            }
        }
    }
}

/// A derived buffer follows every update (pitfall 7): AdamW's, a load, a written parameter, a restore.
#[test]
fn the_shadow_follows_every_change_of_the_parameters() {
    for math in [Math::Bf16, Math::F16] {
        let plan = plan_in(math, Family::Llama, false);
        let mut trainer = trainer(&plan, Hyper::default(), 2);
        let check = |trainer: &mut Trainer<CpuBackend>, when: &str| {
            let [found, expected] = shadows(&plan, trainer.session_mut());
            assert!(found.iter().any(|&b| b != 0), "{when}");
            assert_eq!(found, expected, "{math}, {when}");
            found
        };
        let loaded = check(&mut trainer, "after loading");
        let start = trainer.session_mut().snapshot().unwrap();
        for step in 0..4 {
            trainer.step(&scored(&plan, step)).unwrap();
            assert_ne!(check(&mut trainer, "after a step"), loaded);
        }
        let name = "model.layers.0.self_attn.k_proj.weight";
        let mut values = trainer.session_mut().read_param(name).unwrap();
        let before = check(&mut trainer, "before a write");
        values[7] = 0.3;
        trainer.session_mut().write_param(name, &values).unwrap();
        assert_ne!(check(&mut trainer, "after a write"), before);
        trainer.session_mut().restore(&start).unwrap();
        assert_eq!(check(&mut trainer, "after a restore"), loaded);
    }
    assert!(
        plan_in(Math::Tf32, Family::Llama, false)
            .arenas
            .shadow
            .is_none()
    );
}

fn scale(trainer: &mut Trainer<CpuBackend>) -> LossScale {
    let state = trainer.session_mut().loss_scale().unwrap();
    state.expect("f16 has a loss scale")
}

/// An overflowing step changes no bit of weights, shadow and moments, whether eager or replayed
/// (pitfall 8), and halves the scale.
#[test]
fn an_overflowing_step_changes_nothing_but_the_loss_scale() {
    let plan = plan_in(Math::F16, Family::Llama, false);
    let arenas = plan.arenas;
    let kept = [
        arenas.param,
        arenas.moment1,
        arenas.moment2,
        arenas.shadow.expect("a shadow").slot,
    ];
    for warm in [1, 5] {
        let mut trainer = trainer(&plan, Hyper::default(), 2);
        for step in 0..warm {
            assert!(trainer.step(&scored(&plan, step)).unwrap().applied());
        }
        let before = trainer.session_mut().digests(&kept).unwrap();
        let applied = trainer.session().progress().applied;
        let huge = LossScale {
            scale: 2.0_f32.powi(100),
            ..LossScale::INITIAL
        };
        trainer.session_mut().set_loss_scale(huge).unwrap();
        let report = trainer.step(&scored(&plan, warm)).unwrap();
        assert_eq!(report.dropped, Dropped::NON_FINITE_NORM);
        assert!(report.loss.is_finite(), "the loss itself carries no scale");
        assert_eq!(trainer.session_mut().digests(&kept).unwrap(), before);
        let progress = trainer.session().progress();
        assert_eq!((progress.taken, progress.applied), (warm + 1, applied));
        let state = scale(&mut trainer);
        assert_eq!(state.scale, 2.0_f32.powi(99));
        assert_eq!((state.good_steps, state.skipped), (0, 1));
        let usable = LossScale {
            scale: 1024.0,
            ..state
        };
        trainer.session_mut().set_loss_scale(usable).unwrap();
        assert!(trainer.step(&scored(&plan, warm + 1)).unwrap().applied());
        assert_ne!(trainer.session_mut().digests(&kept).unwrap(), before);
        assert_eq!(scale(&mut trainer).skipped, 1);
    }
}

#[test]
fn the_loss_scale_grows_is_part_of_snapshots_and_shows_in_no_norm() {
    let plan = plan_in(Math::F16, Family::Llama, true);
    let mut trainer = trainer(&plan, Hyper::default(), 2);
    let start = trainer.session_mut().snapshot().unwrap();
    let first = trainer.step(&scored(&plan, 0)).unwrap();
    for step in 1..6 {
        trainer.step(&scored(&plan, step)).unwrap();
    }
    let state = scale(&mut trainer);
    assert_eq!(
        (state.scale, state.good_steps),
        (131_072.0, 2),
        "an interval of 4"
    );
    trainer.session_mut().restore(&start).unwrap();
    assert_eq!(scale(&mut trainer), LossScale::INITIAL);
    // A power of two moves exponents alone: while nothing is rounded away the bits are the same, and
    // nothing but subnormal numbers is rounded otherwise.
    let half = LossScale {
        scale: 32_768.0,
        ..LossScale::INITIAL
    };
    trainer.session_mut().set_loss_scale(half).unwrap();
    let again = trainer.step(&scored(&plan, 0)).unwrap();
    assert_eq!(again.loss.to_bits(), first.loss.to_bits());
    let difference = (again.grad_norm - first.grad_norm).abs() / first.grad_norm;
    assert!(difference < 1e-3, "{difference}");
    for math in [Math::F32, Math::Bf16] {
        let plan = plan_in(math, Family::Llama, true);
        assert_eq!(session(&plan, 1).loss_scale().unwrap(), None);
    }
}

#[test]
fn an_evaluation_and_logits_of_a_narrow_domain_are_those_of_its_step() {
    for math in NARROW {
        let plan = plan_in(math, Family::Qwen2, true);
        let mut trainer = trainer(&plan, Hyper::default(), 2);
        let given = scored(&plan, 3);
        let found = trainer.evaluate(&given).unwrap();
        let logits = trainer.logits(&given).unwrap();
        assert!(logits.iter().any(|&x| x != 0.0));
        let storage = math.storage();
        let stored = decode(storage, &encode(storage, &logits).unwrap()).unwrap();
        assert_eq!(stored, logits, "logits are numbers of the storage");
        let part = trainer.logits_of(5..7, &given).unwrap();
        assert_eq!(part, logits[5 * VOCAB..7 * VOCAB]);
        let report = trainer.step(&given).unwrap();
        assert_eq!(found.loss.to_bits(), report.loss.to_bits());
    }
}

/// Products read no norm and no embedding that is not a head too, so neither has a shadow.
#[test]
fn only_what_products_read_has_a_shadow() {
    for (tied, embedded) in [(true, true), (false, false)] {
        let plan = plan_in(Math::Bf16, Family::Llama, tied);
        for param in &plan.params {
            let values = vec![0.5; plan.shape_of(param).elements()];
            let expected = match param.name.as_str() {
                "model.embed_tokens.weight" => embedded,
                name => !name.contains("norm"),
            };
            let shadow = plan.shadow_of(param.slot, &values);
            assert_eq!(shadow.is_some(), expected, "{}", param.name);
        }
        let shadow = plan.arenas.shadow.expect("a shadow");
        let spec = plan.slots.spec(shadow.slot);
        let all = plan.slots.spec(plan.arenas.param).shape.elements();
        assert!(spec.shape.elements() < all);
    }
}
