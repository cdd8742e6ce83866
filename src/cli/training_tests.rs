use std::path::Path;

use super::*;
use crate::cpu::CpuBackend;
use crate::cpu::context::CpuContext;
use crate::cpu::simd::SimdPath;
use crate::io::Recipe;
use crate::io::checkpoint::{CHECKPOINTS, WhenDamaged, newest};
use crate::report::MetricsWriter;

#[path = "../../tests/engine/faulty.rs"]
mod faulty;

use faulty::{Faulty, Plans};

fn recipe() -> Recipe {
    let text = "name = \"r\"\nsteps = 12\n[model]\nfamily = \"llama\"\nvocab_size = 64\nd_model = 16\n\
                n_layers = 1\nn_heads = 2\nd_ff = 24\n[data]\nbatch = 2\nseq_len = 24\n[optimizer]\n\
                lr = 1e-2\n[checkpoint]\nevery = 4\n";
    Recipe::from_toml(text, "r").unwrap()
}

fn cpu() -> CpuBackend {
    CpuBackend::new(CpuContext::new(SimdPath::detect(), 1).unwrap())
}

fn training<B: Backend>(folder: &Path, run: &Run<B>) -> Training {
    let metrics = MetricsWriter::create(&folder.join("metrics.jsonl")).unwrap();
    let text = run.recipe.to_toml().unwrap();
    let checkpoints = CheckpointWriter::new(folder, text, run);
    let recorder = Recorder::new(metrics, None);
    Training::new(Some(recorder), Some(checkpoints), Progress::Quiet)
}

#[test]
fn a_device_fault_ends_a_run_with_its_code_and_the_last_checkpoint_goes_on_to_the_same_bits() {
    let mut whole = Run::open(recipe(), cpu()).unwrap();
    for _ in 0..12 {
        whole.step(None).unwrap();
    }
    let expected = whole.trainer.session_mut().root().unwrap();
    type Break = fn(&Plans);
    let breaks: [(u64, Break, u64); 2] = [
        (9, |plans| plans.graph_fails.set(true), 8),
        (2, |plans| plans.launches_left.set(Some(7)), 0),
    ];
    for (healthy, break_it, saved) in breaks {
        let folder = tempfile::tempdir().unwrap();
        let plans = Plans::default();
        let device = Faulty {
            cpu: cpu(),
            plans: plans.clone(),
        };
        let mut run = Run::open(recipe(), device).unwrap();
        let mut training = training(folder.path(), &run);
        let end = training.steps(&mut run, Some(healthy)).unwrap();
        assert!(matches!(end, End::Until));
        break_it(&plans);
        let Err(error) = training.steps(&mut run, None) else {
            panic!("a fault of the device ends the run");
        };
        assert_eq!(error.exit_code().code(), 3, "{error}");
        assert!(error.to_string().contains("planned fault"), "{error}");
        assert_eq!(run.trainer.session().progress().taken, healthy);
        drop(training);
        let found = newest(&folder.path().join(CHECKPOINTS), WhenDamaged::Refuse);
        if saved == 0 {
            assert!(found.is_err(), "no step was saved");
            continue;
        }
        let found = found.unwrap().checkpoint;
        assert_eq!(found.state.step, saved);
        let mut again = Run::open(recipe(), cpu()).unwrap();
        again.resume(&found, &recipe().to_toml().unwrap()).unwrap();
        for _ in saved..12 {
            again.step(None).unwrap();
        }
        assert_eq!(again.trainer.session_mut().root().unwrap(), expected);
    }
}
