//! A batch in passes: every split has the bits of the whole batch, and an open window is guarded.

use std::sync::Arc;

use bitstep::cpu::CpuBackend;
use bitstep::data::{Batch, IGNORE};
use bitstep::engine::{Hyper, StepReport, Trainer};
use bitstep::error::{CaptureError, PlanError, StepError};
use bitstep::model::Family;
use bitstep::op::Slot;
use bitstep::op::step_values::Dropped;
use bitstep::plan::{Passes, Plan, PlanConfig, ProgramKind, StepForm};
use bitstep::shape::Math;

use super::common::*;
use super::faulty::{Faulty, Plans};

/// A plan of `batch` sequences of 7 tokens in micro-batches of `micro`.
fn split(
    (family, tied): (Family, bool),
    (batch, grain, micro): (usize, usize, usize),
    math: Math,
) -> Arc<Plan> {
    let passes = match micro == batch {
        true => Passes::Whole,
        false => Passes::Micro { sequences: micro },
    };
    let config = PlanConfig {
        grain,
        math,
        growth_interval: 3,
        form: StepForm {
            passes,
            ..StepForm::default()
        },
        ..PlanConfig::of(batch, 7)
    };
    Arc::new(Plan::build(&model(family, tied), config).expect("plans"))
}

/// A batch whose sequences have very different numbers of scored targets, one of them none.
fn ragged(plan: &Plan, step: u64) -> Batch {
    let mut made = batch(plan, step);
    for (i, target) in made.targets.iter_mut().enumerate() {
        let (row, column) = (i / 7, i % 7);
        if row == 1 || (row.is_multiple_of(3) && column > 2) {
            *target = IGNORE;
        }
    }
    made
}

/// Everything a step leaves: weights, gradients, moments, by their digests.
fn state(trainer: &mut Trainer<CpuBackend>) -> Vec<blake3::Hash> {
    let plan = trainer.session().plan().clone();
    let states = plan.params.iter().filter_map(|p| p.state);
    let mut slots: Vec<Slot> = plan.params.iter().map(|p| p.slot).collect();
    slots.extend(states.flat_map(|s| [s.grad, s.moment1, s.moment2]));
    slots.extend(plan.arenas.shadow.map(|shadow| shadow.slot));
    slots.extend(plan.inputs.loss_scale);
    trainer.session_mut().digests(&slots).unwrap()
}

/// Loss, norm and coefficient of each step as bits, with the state after it.
type Course = Vec<([u32; 3], Vec<blake3::Hash>)>;

fn course(plan: &Arc<Plan>, warmup_steps: u32, steps: u64) -> Course {
    let mut trainer = trainer(plan, Hyper::default(), warmup_steps);
    let step = |step| {
        let report = trainer.step(&ragged(plan, step)).unwrap();
        assert!(report.applied());
        let floats = [report.loss, report.grad_norm, report.clip_coefficient];
        (floats.map(f32::to_bits), state(&mut trainer))
    };
    (0..steps).map(step).collect()
}

#[test]
fn every_split_of_a_batch_has_the_bits_of_the_whole() {
    for (family, tied) in [
        (Family::Llama, true),
        (Family::Qwen2, false),
        (Family::Qwen3, true),
    ] {
        for (batch, grain) in [(8, 1), (16, 2), (12, 1), (10, 2)] {
            let of = |micro| split((family, tied), (batch, grain, micro), Math::F32);
            let whole = course(&of(batch), 2, 4);
            let micros = (1..batch).filter(|m| batch.is_multiple_of(*m) && m.is_multiple_of(grain));
            for micro in micros {
                let found = course(&of(micro), 2, 4);
                assert!(
                    found == whole,
                    "{family:?} {batch} in {micro}, grain {grain}"
                );
            }
        }
    }
}

#[test]
fn every_split_has_the_bits_of_the_whole_in_the_narrow_domains() {
    for math in [Math::Tf32, Math::Bf16, Math::F16] {
        let of = |micro| split((Family::Qwen3, true), (4, 1, micro), math);
        let whole = course(&of(4), 2, 4);
        for micro in [1, 2] {
            assert!(course(&of(micro), 2, 4) == whole, "{math} in {micro}");
        }
    }
}

#[test]
fn accumulated_replays_have_the_bits_of_accumulated_eager_passes() {
    let plan = split((Family::Llama, true), (6, 1, 1), Math::F32);
    assert!(course(&plan, 2, 6) == course(&plan, 1000, 6));
}

#[test]
fn another_grain_has_other_bits() {
    // The control of the equalities above: the order of sums does decide bits.
    let of = |grain| {
        course(
            &split((Family::Llama, false), (8, grain, 8), Math::F32),
            2,
            2,
        )
    };
    assert!(of(1) != of(8));
}

#[test]
fn a_pass_that_takes_in_another_level_is_seen_in_the_bits() {
    // What Merge programs hold decides the update, so a lost partial sum would show.
    let plan = split((Family::Llama, false), (4, 1, 1), Math::F32);
    let whole = course(&plan, 1000, 1);
    let mut trainer = trainer(&plan, Hyper::default(), 1000);
    let batch = ragged(&plan, 0);
    for _ in 0..2 {
        assert_eq!(trainer.pass(&batch).unwrap(), None);
    }
    // After two passes their sum stands at level 1.
    let held = plan.window.as_ref().unwrap().levels[1].grad;
    let sum = trainer.session_mut().read_slot(held).unwrap();
    assert!(sum.iter().any(|g| *g != 0.0));
    let mut snapshot = trainer.session_mut().snapshot().unwrap();
    let region = plan.layout.region(held);
    snapshot.region_mut(region).unwrap().fill(0);
    trainer.session_mut().restore(&snapshot).unwrap();
    trainer.step(&batch).unwrap();
    assert!(state(&mut trainer) != whole[0].1);
}

#[test]
fn an_evaluation_in_passes_has_the_bits_of_the_whole_and_leaves_the_window() {
    let whole = split((Family::Llama, true), (12, 1, 12), Math::F32);
    let parts = split((Family::Llama, true), (12, 1, 3), Math::F32);
    let [mut a, mut b] = [&whole, &parts].map(|plan| trainer(plan, Hyper::default(), 2));
    for step in 0..4 {
        let batch = ragged(&whole, step);
        let found = [a.evaluate(&batch).unwrap(), b.evaluate(&batch).unwrap()];
        assert_eq!(found[0].loss.to_bits(), found[1].loss.to_bits());
        assert_eq!(found[0], found[1]);
        a.step(&batch).unwrap();
        for pass in 1..12 {
            assert_eq!(b.pass(&batch).unwrap(), None);
            assert_eq!(b.session().window().unwrap().passes, pass);
            b.evaluate(&ragged(&whole, 50 + pass)).unwrap();
        }
        b.pass(&batch).unwrap().expect("the last pass");
        assert!(state(&mut a) == state(&mut b), "step {step}");
    }
}

#[test]
fn a_refused_pass_changes_nothing() {
    let plan = split((Family::Llama, false), (4, 1, 1), Math::F32);
    for warm in [1, 4] {
        let mut trainer = trainer(&plan, Hyper::default(), 2);
        for step in 0..warm {
            trainer.step(&ragged(&plan, step)).unwrap();
        }
        let batch = ragged(&plan, 9);
        trainer.pass(&batch).unwrap();
        let before = trainer.session_mut().snapshot().unwrap();
        let other = trainer.pass(&ragged(&plan, 10)).unwrap_err();
        assert!(
            matches!(other, StepError::OtherBatch { passes: 1, .. }),
            "{other}"
        );
        let mut weighed = batch.clone();
        weighed.normaliser = Some(3.0);
        let other = trainer.step(&weighed).unwrap_err();
        assert!(
            matches!(other, StepError::OtherNormaliser { .. }),
            "{other}"
        );
        let mut broken = batch.clone();
        broken.input_ids[25] = -4;
        assert!(matches!(trainer.pass(&broken), Err(StepError::Batch(_))));
        trainer.hyper_mut().beta1 = 0.5;
        assert!(matches!(trainer.pass(&batch), Err(StepError::Guard(_))));
        trainer.hyper_mut().beta1 = 0.9;
        assert_eq!(trainer.session_mut().snapshot().unwrap(), before);
        assert_eq!(trainer.session().progress().taken, warm);
        // Only the last pass moves a counter.
        let report = trainer.step(&batch).unwrap();
        assert_eq!((report.step, report.scored), (warm, batch.active_targets()));
        assert_eq!(trainer.session().window(), None);
    }
}

#[test]
fn a_window_with_a_value_that_is_not_finite_is_dropped_whole() {
    let plan = split((Family::Llama, false), (4, 1, 1), Math::F32);
    let mut trainer = trainer(&plan, Hyper::default(), 2);
    for step in 0..3 {
        trainer.step(&ragged(&plan, step)).unwrap();
    }
    let arenas = plan.arenas;
    let kept = [arenas.param, arenas.moment1, arenas.moment2];
    let before = trainer.session_mut().digests(&kept).unwrap();
    let mut bad = ragged(&plan, 3);
    // Finite weights whose loss is not: only the second pass has it.
    bad.weights[8] = f32::MAX;
    bad.weights[7] = f32::MAX;
    for column in 7..14 {
        bad.targets[column] = 1;
        bad.weights[column] = f32::MAX;
    }
    let report: StepReport = trainer.step(&bad).unwrap();
    assert!(
        report
            .dropped
            .intersects(Dropped::NON_FINITE_LOSS | Dropped::NON_FINITE_NORM)
    );
    assert_eq!(trainer.session_mut().digests(&kept).unwrap(), before);
    let progress = trainer.session().progress();
    assert_eq!((progress.taken, progress.applied), (4, 3));
    assert!(trainer.step(&ragged(&plan, 4)).unwrap().applied());
}

#[test]
fn passes_are_programs_of_their_own_over_one_layout() {
    let plan = split((Family::Llama, true), (12, 1, 1), Math::F32);
    let kinds: Vec<String> = plan
        .programs()
        .iter()
        .map(|(kind, _)| kind.to_string())
        .collect();
    let expected =
        "evaluate accumulate merge 0 keep 0 merge 1 keep 1 merge 2 keep 2 merge 3 keep 3 apply";
    assert_eq!(kinds.join(" "), expected);
    assert!(plan.calls(ProgramKind::Step).is_empty());
    let whole = split((Family::Llama, true), (12, 1, 12), Math::F32);
    assert_eq!(plan.definition(), whole.manifest().hash());
    assert_ne!(plan.manifest().hash(), whole.manifest().hash());
    assert!(plan.manifest().text().contains("program merge 3\n"));
    let mut trainer = trainer(&plan, Hyper::default(), 2);
    for step in 0..3 {
        trainer.step(&ragged(&plan, step)).unwrap();
    }
    assert_eq!(trainer.session().state_name(), "replaying");
}

#[test]
fn a_micro_batch_that_does_not_divide_the_batch_in_whole_grains_is_refused() {
    for (micro, grain) in [(3, 1), (1, 2), (0, 1), (16, 1)] {
        let config = PlanConfig {
            grain,
            form: StepForm {
                passes: Passes::Micro { sequences: micro },
                ..StepForm::default()
            },
            ..PlanConfig::of(8, 7)
        };
        let refused = Plan::build(&model(Family::Llama, false), config).unwrap_err();
        assert!(
            matches!(
                refused,
                PlanError::Form {
                    form: "a micro-batch",
                    ..
                }
            ),
            "{refused}"
        );
    }
}

#[test]
fn a_proof_in_the_middle_of_a_window_keeps_it() {
    let plan = split((Family::Llama, true), (4, 1, 1), Math::F32);
    let whole = course(&plan, 1000, 3);
    let hyper = Hyper::default();
    let mut session = session(&plan, 1);
    for step in 0..2 {
        session.step(&ragged(&plan, step), &hyper).unwrap();
    }
    let batch = ragged(&plan, 2);
    for _ in 0..3 {
        session.pass(&batch, &hyper).unwrap();
        let (next, outcome) = session.advance(&batch, &hyper);
        outcome.unwrap();
        session = next;
        // A pass needs a state that steps.
        while session.state_name() != "replaying" {
            let (next, outcome) = session.advance(&batch, &hyper);
            outcome.unwrap();
            session = next;
        }
    }
    assert_eq!(session.window().unwrap().passes, 3);
    let report = session.step(&batch, &hyper).unwrap();
    assert_eq!(report.loss.to_bits(), whole[2].0[0]);
    let params: Vec<Slot> = plan.params.iter().map(|p| p.slot).collect();
    assert!(session.digests(&params).unwrap()[..] == whole[2].1[..params.len()]);
}

/// The proof launches each program's graph once.
#[test]
fn a_replay_that_does_nothing_is_refused_for_every_program() {
    let plan = split((Family::Llama, true), (4, 1, 1), Math::F32);
    let programs = plan.programs().iter().count() as u32;
    for idle in 0..programs {
        let (mut trainer, plans) = faulty(&plan);
        plans.idle_launch.set(Some(idle));
        let refused = trainer.step(&ragged(&plan, 2)).unwrap_err();
        assert!(
            matches!(refused, StepError::Capture(CaptureError::NotEqual { .. })),
            "program {idle}: {refused}"
        );
    }
}

fn faulty(plan: &Arc<Plan>) -> (Trainer<Faulty>, Plans) {
    let plans = Plans::default();
    let mut trainer = failing_trainer(plan, &plans);
    for step in 0..2 {
        trainer.step(&ragged(plan, step)).unwrap();
    }
    (trainer, plans)
}

#[test]
fn a_failed_pass_poisons_and_moves_no_counter() {
    let plan = split((Family::Llama, true), (4, 1, 1), Math::F32);
    let (mut trainer, plans) = faulty(&plan);
    trainer.step(&ragged(&plan, 2)).unwrap();
    let batch = ragged(&plan, 3);
    trainer.pass(&batch).unwrap();
    let before = (
        trainer.session().progress(),
        trainer.session().window().cloned(),
    );
    plans.graph_fails.set(true);
    assert!(matches!(trainer.step(&batch), Err(StepError::Device(_))));
    plans.graph_fails.set(false);
    let first = trainer.pass(&batch).unwrap_err().to_string();
    assert!(first.contains("planned fault"), "{first}");
    let after = (
        trainer.session().progress(),
        trainer.session().window().cloned(),
    );
    assert_eq!(after, before);
}

#[test]
fn a_failed_capture_of_one_program_leaves_a_session_that_can_be_captured_again() {
    let plan = split((Family::Llama, true), (4, 1, 1), Math::F32);
    let (mut trainer, plans) = faulty(&plan);
    let programs = plan.programs().iter().count() as u32;
    for left in 0..programs {
        plans.captures_left.set(Some(left));
        let refused = trainer.step(&ragged(&plan, 2)).unwrap_err();
        assert!(
            matches!(
                refused,
                StepError::Capture(CaptureError::MemoryNodes { .. })
            ),
            "{left}: {refused}"
        );
    }
    plans.captures_left.set(None);
    assert!(trainer.step(&ragged(&plan, 2)).unwrap().applied());
    assert_eq!(trainer.session().state_name(), "replaying");
}

#[test]
fn a_program_that_chooses_its_kernels_in_the_proof_is_captured_again() {
    let plan = split((Family::Llama, true), (4, 1, 1), Math::F32);
    let programs = plan.programs().iter().count();
    let captures = |plans: &Plans| {
        let log = plans.log.borrow();
        log.iter().filter(|call| **call == "capture").count()
    };
    for (changed, expected) in [(false, programs), (true, 2 * programs)] {
        let (mut trainer, plans) = faulty(&plan);
        plans.kernels_changed.set(changed);
        let stepped = trainer.step(&ragged(&plan, 2));
        assert_eq!(captures(&plans), expected);
        // Kernels that go on changing still trip the guard of every replay.
        assert_eq!(stepped.is_err(), changed);
    }
}
