use std::io;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;
use crate::cpu::CpuBackend;
use crate::cpu::context::CpuContext;
use crate::cpu::simd::SimdPath;
use crate::io::Recipe;
use crate::io::checkpoint::{DiskFile, WhenDamaged, newest};

fn run(more: &[&str]) -> Run<CpuBackend> {
    let text = "name = \"r\"\nsteps = 9\n[model]\nfamily = \"llama\"\nvocab_size = 64\nd_model = 16\n\
                n_layers = 1\nn_heads = 2\nd_ff = 24\n[data]\nbatch = 2\nseq_len = 24\n[optimizer]\n\
                lr = 1e-2\n[checkpoint]\nevery = 2\n";
    let mut recipe = Recipe::from_toml(text, "r").unwrap();
    recipe.set_all(more.iter().copied()).unwrap();
    let cpu = CpuBackend::new(CpuContext::new(SimdPath::detect(), 1).unwrap());
    Run::open(recipe, cpu).unwrap()
}

fn writer(folder: &Path, run: &Run<CpuBackend>) -> CheckpointWriter {
    CheckpointWriter::new(folder, run.recipe.to_toml().unwrap(), run)
}

fn steps(folder: &Path) -> Vec<u64> {
    let whole = list(&folder.join(CHECKPOINTS)).unwrap().whole;
    whole.into_iter().map(|(step, _)| step).collect()
}

/// A disk that begins a file only when it is told to.
struct Gate {
    begun: Sender<()>,
    go: Mutex<Receiver<()>>,
}

impl Disk for Gate {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        LocalDisk.create_folder(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let _ = self.begun.send(());
        let gone = |_| io::Error::other("no one opens the gate");
        self.go.lock().unwrap().recv().map_err(gone)?;
        LocalDisk.create_file(path)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        LocalDisk.sync_folder(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        LocalDisk.rename(from, to)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        LocalDisk.remove_folder(path)
    }
}

#[test]
fn checkpoints_come_at_their_steps_and_after_the_last_and_old_ones_go() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = run(&["checkpoint.keep_last=2", "checkpoint.keep_every=4"]);
    let mut writer = writer(folder.path(), &run);
    for _ in 0..9 {
        run.step(None).unwrap();
        writer.after_step(&mut run, None).unwrap();
    }
    let last = writer.wait().unwrap().expect("a checkpoint");
    assert!(last.ends_with("checkpoints/step-9"));
    assert_eq!(steps(folder.path()), [4, 8, 9]);
}

#[test]
fn the_checkpoint_of_the_lowest_loss_is_saved_and_kept_until_a_lower_one() {
    let folder = tempfile::tempdir().unwrap();
    let keys = [
        "evaluation.every=1",
        "checkpoint.keep_best=true",
        "checkpoint.keep_last=1",
        "checkpoint.every=4",
    ];
    let mut run = run(&keys);
    let mut best = writer(folder.path(), &run);
    let losses = [5.0, 3.0, 4.0, f64::NAN, 3.0, 2.0, 9.0, 2.5];
    let kept: [&[u64]; 8] = [&[1], &[2], &[2], &[2, 4], &[2, 4], &[6], &[6], &[6, 8]];
    for (loss, expected) in losses.into_iter().zip(kept) {
        run.step(None).unwrap();
        best.after_step(&mut run, Some(loss)).unwrap();
        best.wait().unwrap();
        assert_eq!(steps(folder.path()), expected, "after the loss {loss}");
    }
    assert_eq!(best.best(), Some(6));
    // A writer of a run that goes on knows the best one only when it is told.
    let mut told = writer(folder.path(), &run).with_best(Some((6, 2.0)));
    run.step(None).unwrap();
    told.after_step(&mut run, Some(2.0)).unwrap();
    told.wait().unwrap();
    assert_eq!(steps(folder.path()), [6, 9]);
}

#[test]
fn training_goes_on_while_a_checkpoint_is_written_with_the_state_of_its_step() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = run(&[]);
    let (begun, has_begun) = channel();
    let (open, go) = channel();
    let gate = Gate {
        begun,
        go: Mutex::new(go),
    };
    let mut writer = writer(folder.path(), &run).on(Arc::new(gate));
    run.step(None).unwrap();
    let root = run.trainer.session_mut().root().unwrap();
    writer.save(&mut run).unwrap();
    has_begun.recv().unwrap();
    // No file is begun yet, and the run takes its steps.
    for _ in 0..3 {
        run.step(None).unwrap();
        assert!(steps(folder.path()).is_empty());
    }
    for _ in 0..3 {
        open.send(()).unwrap();
    }
    writer.wait().unwrap();
    assert_eq!(steps(folder.path()), [1]);
    let found = newest(&folder.path().join(CHECKPOINTS), WhenDamaged::Refuse).unwrap();
    let text = run.recipe.to_toml().unwrap();
    run.resume(&found.checkpoint, &text).unwrap();
    assert_eq!(run.trainer.session_mut().root().unwrap(), root);
}

#[test]
fn a_save_that_fails_is_told_and_the_one_before_stands() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = run(&[]);
    run.step(None).unwrap();
    let mut first = writer(folder.path(), &run);
    first.save(&mut run).unwrap();
    first.wait().unwrap();
    run.step(None).unwrap();
    let (begun, _) = channel();
    let (_, go) = channel();
    let gate = Gate {
        begun,
        go: Mutex::new(go),
    };
    let mut second = writer(folder.path(), &run).on(Arc::new(gate));
    second.save(&mut run).unwrap();
    let failed = second.wait().map(|_| ()).unwrap_err();
    assert!(matches!(failed, CheckpointError::Write { .. }), "{failed}");
    assert_eq!(failed.exit_code().code(), 4);
    assert_eq!(steps(folder.path()), [1]);
    assert!(second.last_written().unwrap().ends_with("step-1"));
}

/// A disk whose first use panics.
struct Broken;

impl Disk for Broken {
    fn create_folder(&self, _: &Path) -> io::Result<()> {
        panic!("a fault of the writer")
    }

    fn create_file(&self, _: &Path) -> io::Result<Box<dyn DiskFile>> {
        Err(io::Error::other("broken"))
    }

    fn sync_folder(&self, _: &Path) -> io::Result<()> {
        Err(io::Error::other("broken"))
    }

    fn rename(&self, _: &Path, _: &Path) -> io::Result<()> {
        Err(io::Error::other("broken"))
    }

    fn remove_folder(&self, _: &Path) -> io::Result<()> {
        Err(io::Error::other("broken"))
    }
}

#[test]
fn a_writer_that_panics_is_an_error_of_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = run(&[]);
    let mut writer = writer(folder.path(), &run).on(Arc::new(Broken));
    writer.save(&mut run).unwrap();
    let failed = writer.wait().map(|_| ()).unwrap_err();
    assert!(
        matches!(failed, CheckpointError::WriterPanicked { .. }),
        "{failed}"
    );
}
