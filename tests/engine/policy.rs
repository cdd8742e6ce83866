//! A policy gradient: a small model learns to walk to the end of a corridor, by the halves of its steps.
//!
//! The environment is built in. A walker stands at one of nine places; each token it says is an action: a third of
//! them walk left, a third right, the others stand still. Every step that ends at the last place is rewarded. The
//! model reads the places it has been at and its logits are the policy; advantages are the weights of the actions as
//! targets.

use std::sync::Arc;

use bitstep::backend::Backend;
use bitstep::cuda::products::GemmChoice;
use bitstep::data::Batch;
use bitstep::engine::halves::BackwardOptions;
use bitstep::engine::init::FreshInit;
use bitstep::engine::{Hyper, Trainer};
use bitstep::model::decoder::Decoder;
use bitstep::model::{Family, ModelConfig};
use bitstep::num;
use bitstep::num::philox::{Philox, Purpose};
use bitstep::plan::{Passes, Plan, PlanConfig, StepForm};

use super::common::cpu;

const PLACES: i32 = 9;
const VOCAB: usize = 12;
const EPISODES: usize = 8;
const STEPS: usize = 10;
const UPDATES: u64 = 24;

/// The root after the last update, on every backend.
const ROOT: &str = "5c44886ffc2a34f054b008572ab240e4d0fac6186c5d0dbb8f9b5940ed1f95ae";

fn plan() -> Arc<Plan> {
    let model = Decoder::new(ModelConfig {
        family: Family::Llama,
        vocab_size: VOCAB,
        d_model: 16,
        n_layers: 1,
        n_heads: 2,
        n_kv_heads: 1,
        head_dim: 8,
        d_ff: 32,
        rope_theta: 1e4,
        rms_norm_eps: 1e-5,
        tie_embeddings: false,
        max_seq_len: STEPS,
        init_std: 0.1,
    });
    let config = PlanConfig {
        form: StepForm {
            passes: Passes::Halves { most_passes: 1 },
            ..StepForm::default()
        },
        ..PlanConfig::of(EPISODES, STEPS)
    };
    Arc::new(Plan::build(&model, config).expect("plans"))
}

/// An action drawn from the softmax of logits by one random word.
fn draw(logits: &[f32], word: u32) -> usize {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f32> = logits.iter().map(|x| num::exp(x - max)).collect();
    let total: f32 = weights.iter().sum();
    let mut left = word as f32 * 2f32.powi(-32) * total;
    let chosen = weights.iter().position(|w| {
        left -= w;
        left < 0.0
    });
    chosen.unwrap_or(VOCAB - 1)
}

/// What the walkers saw, did and were given.
struct Rollout {
    batch: Batch,
    /// Of each episode, those of its steps.
    rewards: Vec<Vec<f32>>,
}

fn rollout<B: Backend>(trainer: &mut Trainer<B>, update: u64) -> Rollout {
    let random = Philox::new(17, Purpose::Sampling, update as u32);
    let tokens = EPISODES * STEPS;
    let mut batch = Batch {
        batch: EPISODES,
        seq_len: STEPS,
        input_ids: vec![0; tokens],
        targets: vec![0; tokens],
        weights: vec![0.0; tokens],
        normaliser: None,
    };
    let mut rewards = vec![Vec::new(); EPISODES];
    let mut places: Vec<i32> = (0..EPISODES as i32).collect();
    for step in 0..STEPS {
        for (episode, place) in places.iter().enumerate() {
            batch.input_ids[episode * STEPS + step] = *place;
        }
        let logits = trainer.forward(&batch).expect("logits");
        for (episode, place) in places.iter_mut().enumerate() {
            let row = episode * STEPS + step;
            let word = random.block(row as u64)[0];
            let action = draw(&logits[row * VOCAB..(row + 1) * VOCAB], word);
            batch.targets[row] = action as i32;
            *place = match action % 3 {
                0 => (*place - 1).max(0),
                1 => (*place + 1).min(PLACES - 1),
                _ => *place,
            };
            rewards[episode].push(f32::from(u8::from(*place == PLACES - 1)));
        }
    }
    Rollout { batch, rewards }
}

/// Trains; gives the mean return of each update's episodes and the root after the last.
fn train<B: Backend>(backend: B) -> (Vec<f32>, String) {
    let hyper = Hyper {
        lr: 2e-2,
        weight_decay: 0.0,
        ..Hyper::default()
    };
    let mut trainer = Trainer::new(backend, plan(), hyper, 2).expect("an arena");
    trainer.load(&FreshInit { seed: 3 }).expect("loads");
    let mut returns = Vec::new();
    for update in 0..UPDATES {
        let Rollout { mut batch, rewards } = rollout(&mut trainer, update);
        let sums = rewards.iter().map(|r| r.iter().sum::<f32>());
        returns.push(sums.sum::<f32>() / EPISODES as f32);
        // The advantage of an action: the rewards after it, less their mean over the episodes.
        for step in 0..STEPS {
            let to_go: Vec<f32> = rewards.iter().map(|r| r[step..].iter().sum()).collect();
            let mean = to_go.iter().sum::<f32>() / EPISODES as f32;
            for (episode, reward) in to_go.iter().enumerate() {
                batch.weights[episode * STEPS + step] = reward - mean;
            }
        }
        trainer.forward(&batch).expect("logits");
        let options = BackwardOptions::update(Some(1.0), None);
        let report = trainer.backward_targets(&batch, &options);
        assert!(report.expect("a backward").expect("an update").applied());
    }
    assert_eq!(trainer.session().state_name(), "replaying");
    let root = trainer.session_mut().root().expect("a root");
    (returns, root.to_string())
}

#[test]
fn a_policy_learns_by_halves_and_has_its_golden_root() {
    let (returns, root) = train(cpu(2));
    let mean = |r: &[f32]| r.iter().sum::<f32>() / r.len() as f32;
    let (first, last) = (mean(&returns[..4]), mean(&returns[returns.len() - 4..]));
    println!("mean returns {returns:?}");
    assert!(last > first + 1.0, "from {first} to {last}: {returns:?}");
    assert_eq!(root, ROOT);
}

#[test]
fn a_gpu_learns_with_the_same_root() {
    for choice in [GemmChoice::Own, GemmChoice::Auto] {
        let Some(cuda) = crate::gpu::open(choice) else {
            return;
        };
        assert_eq!(train(cuda).1, ROOT, "{choice:?}");
    }
}
