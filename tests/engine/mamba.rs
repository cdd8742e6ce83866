//! Mamba in the engine: windows that go on, states handed over, and what they may not depend on.

use std::sync::Arc;

use bitstep::cpu::CpuBackend;
use bitstep::cpu::simd::SimdPath;
use bitstep::data::Batch;
use bitstep::engine::init::FreshInit;
use bitstep::engine::recurrent::Start;
use bitstep::engine::{Hyper, Session, Trainer};
use bitstep::error::StepError;
use bitstep::model::MambaConfig;
use bitstep::model::mamba::{Mamba, Windows};
use bitstep::model::mamba_config::{Decay, MambaFamily};
use bitstep::model::params::Training;
use bitstep::plan::{Plan, PlanConfig};
use bitstep::shape::Math;

use super::common::{VOCAB, batch, cpu, cpu_on, session_on, trainer};

const BATCH: usize = 3;

/// A two-layer model whose sizes are no multiple of any tile.
fn config() -> MambaConfig {
    MambaConfig {
        family: MambaFamily::Mamba,
        vocab_size: VOCAB,
        d_model: 22,
        n_layers: 2,
        expand: 2,
        d_state: 9,
        d_conv: 4,
        dt_rank: 3,
        rms_norm_eps: 1e-5,
        tie_embeddings: true,
        init_std: 0.1,
        decay: Decay::Reference,
    }
}

fn plan(windows: Windows, config: PlanConfig) -> Arc<Plan> {
    let model = Mamba::new(self::config()).with_windows(windows);
    Arc::new(Plan::build(&model, config).expect("plans"))
}

fn session(windows: Windows, seq_len: usize) -> Session<CpuBackend> {
    session_on(&plan(windows, PlanConfig::of(BATCH, seq_len)), cpu(2))
}

/// Steps with it change no weight.
fn frozen() -> Hyper {
    Hyper {
        lr: 0.0,
        ..Hyper::default()
    }
}

/// Positions `first..first + seq_len` of every sequence of a batch.
fn window(whole: &Batch, first: usize, seq_len: usize) -> Batch {
    fn part<T: Clone>(values: &[T], (len, first, seq_len): (usize, usize, usize)) -> Vec<T> {
        let sequences = values.chunks(len);
        sequences
            .flat_map(|s| s[first..first + seq_len].to_vec())
            .collect()
    }
    let place = (whole.seq_len, first, seq_len);
    Batch {
        seq_len,
        input_ids: part(&whole.input_ids, place),
        targets: part(&whole.targets, place),
        weights: part(&whole.weights, place),
        ..whole.clone()
    }
}

/// The logits of positions `first..first + seq_len` of one sequence.
fn rows(
    logits: &[f32],
    (len, sequence): (usize, usize),
    (first, seq_len): (usize, usize),
) -> Vec<u32> {
    let start = (sequence * len + first) * VOCAB;
    let rows = &logits[start..][..seq_len * VOCAB];
    rows.iter().map(|x| x.to_bits()).collect()
}

/// Windows of 1, 2 and 4 positions, shorter than the convolution and not, give the logits of the whole.
#[test]
fn window_by_window_is_the_whole_sequence_bit_for_bit() {
    let len = 12;
    let mut whole = session(Windows::Separate, len);
    let all = batch(&plan(Windows::Separate, PlanConfig::of(BATCH, len)), 1);
    let expected = whole.logits(&all, &frozen()).expect("logits");
    for seq_len in [1, 2, 4] {
        let mut session = session(Windows::Carried, seq_len);
        for first in (0..len).step_by(seq_len) {
            let starts = if first == 0 {
                Start::Fresh
            } else {
                Start::Carried
            };
            session.set_starts(&[starts; BATCH]).expect("three starts");
            let part = window(&all, first, seq_len);
            let logits = session.logits(&part, &frozen()).expect("logits");
            for sequence in 0..BATCH {
                let found = rows(&logits, (seq_len, sequence), (0, seq_len));
                let wanted = rows(&expected, (len, sequence), (first, seq_len));
                assert_eq!(found, wanted, "window of {seq_len} at {first}");
            }
            session.step(&part, &frozen()).expect("a step");
        }
    }
}

#[test]
fn each_sequence_begins_as_its_start_says() {
    let len = 8;
    let all = batch(&plan(Windows::Separate, PlanConfig::of(BATCH, len)), 2);
    let (first, second) = (window(&all, 0, 4), window(&all, 4, 4));
    let mut whole = session(Windows::Separate, len);
    let whole = whole.logits(&all, &frozen()).expect("logits");
    let mut alone = session(Windows::Separate, 4);
    let alone = alone.logits(&second, &frozen()).expect("logits");
    let mut session = session(Windows::Carried, 4);
    session.step(&first, &frozen()).expect("a step");
    let starts = [Start::Carried, Start::Fresh, Start::Carried];
    session.set_starts(&starts).expect("three starts");
    let found = session.logits(&second, &frozen()).expect("logits");
    for (sequence, start) in starts.into_iter().enumerate() {
        let expected = match start {
            Start::Carried => rows(&whole, (len, sequence), (4, 4)),
            Start::Fresh => rows(&alone, (4, sequence), (0, 4)),
        };
        assert_eq!(rows(&found, (4, sequence), (0, 4)), expected, "{sequence}");
    }
}

/// Two sessions of which the second takes over weights, moments and state go on alike.
#[test]
fn a_state_handed_over_goes_on_as_the_uninterrupted_run() {
    let plan = plan(Windows::Carried, PlanConfig::of(BATCH, 5));
    let hyper = Hyper::default();
    let run = |session: &mut Session<CpuBackend>, steps: std::ops::Range<u64>| {
        for step in steps {
            session
                .set_starts(&[Start::Carried; BATCH])
                .expect("starts");
            session.step(&batch(&plan, step), &hyper).expect("a step");
        }
    };
    let mut uninterrupted = session_on(&plan, cpu(2));
    run(&mut uninterrupted, 0..6);
    let mut first = session_on(&plan, cpu(1));
    run(&mut first, 0..3);
    let state = first.recurrent_state().expect("a state");
    assert!(state.iter().any(|&x| x != 0.0));
    let snapshot = first.snapshot().expect("a snapshot");
    let mut second = session_on(&plan, cpu(2));
    second.restore(&snapshot).expect("restores");
    assert_eq!(second.recurrent_state().expect("a state"), state);
    run(&mut second, 3..6);
    let root = uninterrupted.root().expect("a root");
    assert_eq!(second.root().expect("a root"), root);
    let end = uninterrupted.recurrent_state().expect("a state");
    assert_eq!(second.recurrent_state().expect("a state"), end);
    // Without the state the run is another one.
    second.restore(&snapshot).expect("restores");
    let empty = vec![0.0; state.len()];
    second.set_recurrent_state(&empty).expect("its size");
    run(&mut second, 3..6);
    assert_ne!(second.root().expect("a root"), root);
}

#[test]
fn a_dropped_step_keeps_the_state() {
    let plan = plan(Windows::Carried, PlanConfig::of(BATCH, 5));
    let mut session = session_on(&plan, cpu(2));
    session
        .step(&batch(&plan, 0), &Hyper::default())
        .expect("a step");
    let before = session.recurrent_state().expect("a state");
    let spike = Hyper {
        spike_norm: Some(1e-12),
        ..Hyper::default()
    };
    let report = session.step(&batch(&plan, 1), &spike).expect("reported");
    assert!(!report.applied());
    assert_eq!(session.recurrent_state().expect("a state"), before);
    session
        .step(&batch(&plan, 1), &Hyper::default())
        .expect("a step");
    assert_ne!(session.recurrent_state().expect("a state"), before);
}

#[test]
fn replays_carry_the_state_as_eager_steps_do() {
    let plan = plan(Windows::Carried, PlanConfig::of(BATCH, 5));
    let mut eager = session_on(&plan, cpu(2));
    let mut replayed = trainer(&plan, Hyper::default(), 2);
    for step in 0..6 {
        let starts = [Start::Carried, Start::Fresh, Start::Carried];
        eager.set_starts(&starts).expect("starts");
        replayed.session_mut().set_starts(&starts).expect("starts");
        eager
            .step(&batch(&plan, step), &Hyper::default())
            .expect("a step");
        replayed.step(&batch(&plan, step)).expect("a step");
    }
    assert_eq!(replayed.session().state_name(), "replaying");
    let replayed = replayed.session_mut();
    assert_eq!(
        replayed.root().expect("a root"),
        eager.root().expect("a root")
    );
    assert_eq!(
        replayed.recurrent_state().expect("a state"),
        eager.recurrent_state().expect("a state")
    );
}

#[test]
fn a_model_without_state_and_starts_of_another_number_are_refused() {
    let mut separate = session(Windows::Separate, 4);
    let refused = separate.set_starts(&[Start::Fresh; BATCH]);
    assert!(matches!(refused, Err(StepError::NoState)));
    assert!(matches!(
        separate.recurrent_state(),
        Err(StepError::NoState)
    ));
    let mut carried = session(Windows::Carried, 4);
    let refused = carried.set_starts(&[Start::Fresh; 2]);
    let Err(StepError::TensorSize {
        expected, found, ..
    }) = refused
    else {
        panic!("expected a refusal, found {refused:?}");
    };
    assert_eq!((expected, found), (BATCH, 2));
    assert!(carried.set_recurrent_state(&[0.0]).is_err());
}

#[test]
fn threads_and_simd_paths_decide_no_bit_in_any_precision() {
    for math in Math::ALL {
        let config = PlanConfig {
            math,
            grain: 1,
            ..PlanConfig::of(BATCH, 7)
        };
        let plan = plan(Windows::Separate, config);
        let mut roots = Vec::new();
        for path in SimdPath::available() {
            for threads in [1, 3] {
                let mut session = session_on(&plan, cpu_on(path, threads));
                for step in 0..2 {
                    let report = session.step(&batch(&plan, step), &Hyper::default());
                    assert!(report.expect("a step").loss.is_finite());
                }
                roots.push(session.root().expect("a root"));
            }
        }
        assert!(roots.iter().all(|root| *root == roots[0]), "{math}");
    }
}

#[test]
fn the_reference_rule_leaves_the_logarithms_of_a_without_decay() {
    for (decay, expected) in [
        (Decay::Reference, Training::Undecayed),
        (Decay::Matrices, Training::Decayed),
    ] {
        let model = Mamba::new(MambaConfig { decay, ..config() });
        let plan = Plan::build(&model, PlanConfig::of(1, 4)).expect("plans");
        let of = |suffix: &str| {
            let param = plan.params.iter().find(|p| p.name.ends_with(suffix));
            param.expect("there").training
        };
        assert_eq!(of("0.mixer.A_log"), expected);
        assert_eq!(of("0.mixer.D"), Training::Undecayed);
        assert_eq!(of("0.mixer.dt_proj.bias"), Training::Undecayed);
        assert_eq!(of("0.mixer.conv1d.weight"), Training::Decayed);
    }
}

/// The step of a backbone is that of the whole model where features and gradient are the whole model's own:
/// seen by differences of `Σ gradient · output` along the features and along a weight.
#[test]
fn a_backbone_alone_has_the_gradients_of_its_output() {
    let model = Mamba::new(config()).backbone_alone();
    let plan = Arc::new(Plan::build(&model, PlanConfig::of(BATCH, 5)).expect("plans"));
    let mut session = session_on(&plan, cpu(2));
    let elements = BATCH * 5 * config().d_model;
    let wave = |scale: f32| move |i: usize| (i as f32 * scale).sin();
    let features: Vec<f32> = (0..elements).map(wave(0.37)).collect();
    let gradient: Vec<f32> = (0..elements).map(wave(0.91)).collect();
    let mut loss = |features: &[f32]| -> f64 {
        let output = session
            .forward_features(features, &frozen())
            .expect("features");
        let pairs = output.iter().zip(&gradient);
        pairs.map(|(&y, &g)| f64::from(y) * f64::from(g)).sum()
    };
    let slopes: Vec<f64> = [0, 7, elements - 1]
        .map(|i| {
            let mut moved = features.clone();
            moved[i] += 0.01;
            let above = loss(&moved);
            moved[i] -= 0.02;
            (above - loss(&moved)) / 0.02
        })
        .into();
    let report = session.step_features(&features, &gradient, &frozen());
    let report = report.expect("a step");
    assert!(report.loss == 0.0 && report.grad_norm > 0.0);
    let found = session.input_gradient().expect("a gradient");
    for (slope, i) in slopes.into_iter().zip([0, 7, elements - 1]) {
        let error = (slope - f64::from(found[i])).abs();
        assert!(
            error < 2e-3 * slope.abs().max(0.1),
            "{i}: {slope} {}",
            found[i]
        );
    }
    assert!(
        plan.params
            .iter()
            .all(|p| p.name != "backbone.embeddings.weight")
    );
}

/// A backbone's replays and eager steps have the same bits in every precision, and learn.
#[test]
fn a_backbone_steps_in_every_precision() {
    for math in Math::ALL {
        let model = Mamba::new(config()).backbone_alone();
        let config = PlanConfig {
            math,
            ..PlanConfig::of(BATCH, 5)
        };
        let plan = Arc::new(Plan::build(&model, config).expect("plans"));
        let elements = BATCH * 5 * self::config().d_model;
        let features: Vec<f32> = (0..elements).map(|i| (i as f32 * 0.37).sin()).collect();
        let hyper = Hyper {
            lr: 1e-2,
            ..Hyper::default()
        };
        let mut session = session_on(&plan, cpu(2));
        // The loss is half the mean of squares, so the gradient is the output over its size.
        let mut sizes = Vec::new();
        for _ in 0..5 {
            let output = session
                .forward_features(&features, &hyper)
                .expect("features");
            sizes.push(output.iter().map(|x| x * x).sum::<f32>());
            let gradient: Vec<f32> = output.iter().map(|x| x / elements as f32).collect();
            let report = session.step_features(&features, &gradient, &hyper);
            assert!(report.expect("a step").dropped.is_empty(), "{math}");
            assert_eq!(session.output_features().expect("features"), output);
        }
        assert!(sizes[4] < sizes[0], "{math}: {sizes:?}");
    }
}

#[test]
fn features_go_into_a_backbone_alone() {
    let mut tokens = session(Windows::Separate, 4);
    let refused = tokens.forward_features(&[0.0], &frozen());
    assert!(matches!(refused, Err(StepError::NoFeatures)));
    let model = Mamba::new(config()).backbone_alone();
    let plan = Arc::new(Plan::build(&model, PlanConfig::of(BATCH, 5)).expect("plans"));
    let mut session = session_on(&plan, cpu(1));
    let features = vec![0.0; BATCH * 5 * config().d_model];
    let refused = session.step_features(&features, &[0.0], &frozen());
    assert!(matches!(
        refused,
        Err(StepError::TensorSize { found: 1, .. })
    ));
}

/// Steps and replays, with sequences that go on and others that begin anew.
#[test]
fn a_gpu_has_the_bits_and_the_states_of_the_cpu_in_every_precision() {
    for math in Math::ALL {
        let Some(cuda) = crate::gpu::backend() else {
            return;
        };
        let config = PlanConfig {
            math,
            grain: 1,
            ..PlanConfig::of(BATCH, 70)
        };
        let plan = plan(Windows::Carried, config);
        let mut on_cpu = trainer(&plan, Hyper::default(), 100);
        let mut on_gpu = Trainer::new(cuda, plan.clone(), Hyper::default(), 2).expect("an arena");
        on_gpu.load(&FreshInit { seed: 3 }).expect("loads");
        for step in 0..6 {
            let starts = [Start::Carried, Start::Fresh, Start::Carried];
            on_cpu.session_mut().set_starts(&starts).expect("starts");
            on_gpu.session_mut().set_starts(&starts).expect("starts");
            let batch = batch(&plan, step);
            let reports = (on_cpu.step(&batch), on_gpu.step(&batch));
            assert_eq!(
                reports.0.expect("a step"),
                reports.1.expect("a step"),
                "{math}, step {step}"
            );
            let (cpu, gpu) = (on_cpu.session_mut(), on_gpu.session_mut());
            assert_eq!(
                cpu.root().expect("a root"),
                gpu.root().expect("a root"),
                "{math}, step {step}"
            );
            assert_eq!(
                cpu.recurrent_state().expect("a state"),
                gpu.recurrent_state().expect("a state"),
                "{math}, step {step}"
            );
        }
        assert_eq!(on_gpu.session().state_name(), "replaying");
    }
}
