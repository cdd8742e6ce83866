//! A tiny model, its batches and sessions, for tests of the engine.

use std::sync::Arc;

use bitstep::cpu::CpuBackend;
use bitstep::cpu::context::CpuContext;
use bitstep::cpu::simd::SimdPath;
use bitstep::cuda::CudaBackend;
use bitstep::cuda::together::groups;
use bitstep::data::{Batch, IGNORE};
use bitstep::engine::init::FreshInit;
use bitstep::engine::{Hyper, Session, Trainer};
use bitstep::model::decoder::Decoder;
use bitstep::model::lora::{Base, LoraConfig, Norms, Projection};
use bitstep::model::{Family, ModelConfig};
use bitstep::num::philox::{Philox, Purpose};
use bitstep::plan::{Plan, PlanConfig, ProgramKind};

use super::faulty::{Faulty, Plans};
use crate::ptx::DEVICE;

pub const VOCAB: usize = 40;

/// A two-layer model whose sizes are no multiple of any tile.
pub fn model(family: Family, tie_embeddings: bool) -> Decoder {
    Decoder::new(ModelConfig {
        family,
        vocab_size: VOCAB,
        d_model: 24,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 6,
        d_ff: 36,
        rope_theta: 1e4,
        rms_norm_eps: 1e-6,
        tie_embeddings,
        max_seq_len: 4096,
        init_std: 0.1,
    })
}

pub fn plan(config: PlanConfig) -> Arc<Plan> {
    Arc::new(Plan::build(&model(Family::Llama, false), config).expect("plans"))
}

pub fn cpu(threads: usize) -> CpuBackend {
    cpu_on(SimdPath::detect(), threads)
}

pub fn cpu_on(path: SimdPath, threads: usize) -> CpuBackend {
    CpuBackend::new(CpuContext::new(path, threads).expect("a pool"))
}

/// A session with fresh parameters.
pub fn session(plan: &Arc<Plan>, threads: usize) -> Session<CpuBackend> {
    session_on(plan, cpu(threads))
}

pub fn session_on(plan: &Arc<Plan>, backend: CpuBackend) -> Session<CpuBackend> {
    let mut session = Session::new(backend, plan.clone()).expect("an arena");
    session.load(&FreshInit { seed: 3 }).expect("loads");
    session
}

pub fn trainer(plan: &Arc<Plan>, hyper: Hyper, warmup_steps: u32) -> Trainer<CpuBackend> {
    let mut trainer = Trainer::new(cpu(2), plan.clone(), hyper, warmup_steps).expect("an arena");
    trainer.load(&FreshInit { seed: 3 }).expect("loads");
    trainer
}

/// Adapters of a rank on all projections of a plain base, whose norms are trained.
pub fn on_all_projections(rank: usize) -> LoraConfig {
    LoraConfig {
        rank,
        alpha: 16.0,
        targets: Projection::ALL.into(),
        norms: Norms::Trained,
        base: Base::Plain,
    }
}

/// A trainer with fresh parameters on a GPU.
pub fn on_gpu(plan: &Arc<Plan>, cuda: CudaBackend) -> Trainer<CudaBackend> {
    let mut trainer = Trainer::new(cuda, plan.clone(), Hyper::default(), 2).expect("an arena");
    trainer.load(&FreshInit { seed: 3 }).expect("loads");
    trainer
}

/// The kernels of the plan's step on an H200 that serve more than one call.
pub fn kernels_of_groups(plan: &Plan) -> Vec<&'static str> {
    let calls = plan.layout.place(plan.calls(ProgramKind::Step));
    let groups = groups(&calls, &DEVICE).into_iter().flatten();
    let launches = groups.flat_map(|group| group.launches.launches);
    launches.map(|launch| launch.entry).collect()
}

/// Five steps on a GPU, eager and replayed, have the reports and roots of the CPU's.
pub fn assert_steps_of_the_cpu(plan: &Arc<Plan>, cuda: CudaBackend, name: &str) {
    let mut first = trainer(plan, Hyper::default(), 100);
    let mut second = on_gpu(plan, cuda);
    for step in 0..5 {
        let batch = batch(plan, step);
        let reports = [first.step(&batch), second.step(&batch)].map(|r| r.unwrap());
        assert_eq!(reports[0], reports[1], "{name}, step {step}");
        let roots = (
            first.session_mut().root().unwrap(),
            second.session_mut().root().unwrap(),
        );
        assert_eq!(roots.0, roots.1, "{name}, step {step}");
    }
    assert_eq!(second.session().state_name(), "replaying");
}

/// A trainer with fresh parameters on a backend that fails as `plans` says.
pub fn failing_trainer(plan: &Arc<Plan>, plans: &Plans) -> Trainer<Faulty> {
    let backend = Faulty {
        cpu: cpu(1),
        plans: plans.clone(),
    };
    let mut trainer = Trainer::new(backend, plan.clone(), Hyper::default(), 2).unwrap();
    trainer.load(&FreshInit { seed: 3 }).unwrap();
    trainer
}

/// The batch of step `step`: random tokens, some targets ignored, weights of both signs.
pub fn batch(plan: &Plan, step: u64) -> Batch {
    let (batch, seq_len) = (plan.config.batch, plan.config.seq_len);
    let tokens = batch * seq_len;
    let random = Philox::new(step, Purpose::DataText, 99);
    let word = |i: usize, k: usize| random.block(i as u64)[k];
    let id = |i, k| (word(i, k) % VOCAB as u32) as i32;
    let ignored = |i: usize| i > 0 && word(i, 2).is_multiple_of(7);
    Batch {
        batch,
        seq_len,
        input_ids: (0..tokens).map(|i| id(i, 0)).collect(),
        targets: (0..tokens)
            .map(|i| if ignored(i) { IGNORE } else { id(i, 1) })
            .collect(),
        weights: (0..tokens)
            .map(|i| 0.5 + (word(i, 3) % 8) as f32 / 8.0)
            .collect(),
        normaliser: None,
    }
}
