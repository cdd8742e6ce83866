use std::path::Path;

use super::*;
use crate::cpu::CpuBackend;
use crate::cpu::context::CpuContext;
use crate::cpu::simd::SimdPath;
use crate::io::Recipe;
use crate::io::checkpoint::{self, LocalDisk};

/// Twelve windows of eight tokens and batches of five: an epoch ends inside the third step.
fn recipe(folder: &Path, more: &[&str]) -> Recipe {
    let text: String = (0..97u32)
        .map(|i| char::from(b'a' + (i * 7 % 23) as u8))
        .collect();
    std::fs::write(folder.join("t.txt"), text).unwrap();
    let file = folder.join("r.toml");
    let text = "name = \"r\"\nseed = 5\nsteps = 12\nwarmup_steps = 2\n[model]\nfamily = \"llama\"\n\
                vocab_size = 256\nd_model = 16\nn_layers = 1\nn_heads = 2\nd_ff = 24\n\
                tie_embeddings = true\n[data]\nsource = \"text\"\npath = \"t.txt\"\nbatch = 5\n\
                seq_len = 8\ngrain = 5\n[optimizer]\nlr = 1e-2\nbeta1 = 0.83\nbeta2 = 0.991\n\
                [schedule]\nkind = \"cosine\"\nwarmup = 3\n";
    std::fs::write(&file, text).unwrap();
    let mut recipe = Recipe::from_path(&file).unwrap();
    recipe.set_all(more.iter().copied()).unwrap();
    recipe
}

fn open(recipe: &Recipe) -> Run<CpuBackend> {
    let cpu = CpuBackend::new(CpuContext::new(SimdPath::detect(), 1).unwrap());
    Run::open(recipe.clone(), cpu).unwrap()
}

fn take(run: &mut Run<CpuBackend>, steps: u64) -> Vec<u32> {
    let step = |_| run.step(None).unwrap().loss.to_bits();
    (0..steps).map(step).collect()
}

/// The digest of everything that is kept: parameters, moments, carried state.
fn digests(run: &mut Run<CpuBackend>) -> Vec<blake3::Hash> {
    let slots: Vec<Slot> = kept(run.trainer.session().plan())
        .iter()
        .map(|kept| kept.slot)
        .collect();
    run.trainer.session_mut().digests(&slots).unwrap()
}

fn saved(run: &mut Run<CpuBackend>, root: &Path) -> StoredCheckpoint {
    let text = run.recipe.to_toml().unwrap();
    let copy = run.host_copy(&text).unwrap();
    let tensors = copy.tensors();
    let folder = checkpoint::save(&LocalDisk, root, copy.state().clone(), &tensors).unwrap();
    checkpoint::read(&folder).unwrap()
}

fn resumed(recipe: &Recipe, from: &StoredCheckpoint) -> Result<Run<CpuBackend>, Error> {
    let mut run = open(recipe);
    run.resume(from, &recipe.to_toml().unwrap())?;
    Ok(run)
}

#[test]
fn n_and_n_steps_are_2n_bit_for_bit_wherever_the_run_is_cut() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), &[]);
    let mut whole = open(&recipe);
    let losses = take(&mut whole, 12);
    // One step in, still warming up, mid-epoch, at the first replay, before the last step.
    for cut in [1, 2, 3, 6, 11] {
        let mut first = open(&recipe);
        assert_eq!(take(&mut first, cut), losses[..cut as usize]);
        let checkpoint = saved(&mut first, &folder.path().join(format!("cut-{cut}")));
        assert_eq!(checkpoint.state.schedule.lr, first.schedule.lr(cut));
        let mut second = resumed(&recipe, &checkpoint).unwrap();
        assert_eq!(digests(&mut first), digests(&mut second));
        assert_eq!(second.trainer.session().progress().taken, cut);
        assert_eq!(take(&mut second, 12 - cut), losses[cut as usize..], "{cut}");
        assert_eq!(digests(&mut second), digests(&mut whole), "cut at {cut}");
        assert_eq!(
            second.trainer.session().progress(),
            whole.trainer.session().progress()
        );
    }
}

#[test]
fn saving_changes_no_bit_and_may_come_while_replaying() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), &[]);
    let mut plain = open(&recipe);
    take(&mut plain, 9);
    let mut saving = open(&recipe);
    for _ in 0..9 {
        take(&mut saving, 1);
        saved(&mut saving, folder.path());
    }
    assert_eq!(saving.trainer.session().state_name(), "replaying");
    assert_eq!(digests(&mut plain), digests(&mut saving));
}

#[test]
fn weights_alone_go_on_with_other_bits() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), &[]);
    let mut whole = open(&recipe);
    take(&mut whole, 5);
    let mut checkpoint = saved(&mut whole, folder.path());
    let losses = take(&mut whole, 3);
    for (name, tensor) in &mut checkpoint.tensors {
        if name.starts_with("moment") {
            tensor.bytes.fill(0);
        }
    }
    let mut weights = resumed(&recipe, &checkpoint).unwrap();
    // The first loss is computed before an update; the second shows what the moments were.
    let found = take(&mut weights, 3);
    assert_eq!(found[0], losses[0]);
    assert_ne!(found[1..], losses[1..]);
}

#[test]
fn the_second_step_after_a_resume_needs_the_count_of_applied_steps() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), &[]);
    let mut whole = open(&recipe);
    take(&mut whole, 5);
    let mut checkpoint = saved(&mut whole, folder.path());
    let losses = take(&mut whole, 3);
    checkpoint.state.applied = 0;
    let mut run = resumed(&recipe, &checkpoint).unwrap();
    assert_ne!(take(&mut run, 3)[1..], losses[1..]);
}

#[test]
fn a_tied_head_is_saved_once_and_each_moment_has_its_parameter() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = open(&recipe(folder.path(), &[]));
    let checkpoint = saved(&mut run, folder.path());
    let names: Vec<&String> = checkpoint.tensors.keys().collect();
    assert!(names.iter().all(|name| !name.contains("lm_head")));
    let params = run.trainer.session().plan().params.len();
    assert_eq!(names.len(), 3 * params);
    for param in &run.trainer.session().plan().params {
        for name in ["", "moment1.", "moment2."].map(|of| format!("{of}{}", param.name)) {
            assert!(checkpoint.tensors.contains_key(&name), "{name}");
        }
    }
}

#[test]
fn a_missing_misshapen_or_strange_tensor_is_an_error_and_never_zeros() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), &[]);
    let mut run = open(&recipe);
    take(&mut run, 2);
    let whole = saved(&mut run, folder.path());
    let all = kept(run.trainer.session().plan());
    let mut target = open(&recipe);
    let before = digests(&mut target);
    let text = recipe.to_toml().unwrap();
    let mut refusal = |change: &dyn Fn(&mut StoredCheckpoint)| {
        let mut changed = whole.clone();
        change(&mut changed);
        let error = target.resume(&changed, &text).unwrap_err();
        assert_eq!(digests(&mut target), before, "a refusal changes nothing");
        match error {
            Error::Checkpoint(error) => error,
            other => panic!("{other}"),
        }
    };
    for place in &all {
        let missing = refusal(&|c| drop(c.tensors.remove(&place.name)));
        assert!(
            matches!(&missing, CheckpointError::StateMissing { tensor, role, .. }
                if *tensor == place.name && *role == place.role.name()),
            "{missing}"
        );
    }
    let name = all[1].name.clone();
    let shape = refusal(&|c| c.tensors.get_mut(&name).unwrap().shape = Shape::new([1]));
    assert!(matches!(shape, CheckpointError::WrongShape { tensor, .. } if tensor == name));
    let dtype = refusal(&|c| c.tensors.get_mut(&name).unwrap().dtype = StoredType::U32);
    assert!(matches!(dtype, CheckpointError::WrongDtype { tensor, .. } if tensor == name));
    let stray = refusal(&|c| {
        let tensor = c.tensors[&name].clone();
        c.tensors.insert("moment3".to_owned(), tensor);
    });
    assert!(
        matches!(stray, CheckpointError::UnexpectedTensors { tensors, .. } if tensors == ["moment3"])
    );
}

#[test]
fn a_checkpoint_of_another_run_is_refused_by_what_differs() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), &[]);
    let mut run = open(&recipe);
    take(&mut run, 2);
    let whole = saved(&mut run, folder.path());
    type Change = fn(&mut CheckpointState);
    let changes: [(&str, Change); 10] = [
        ("the recipe", |s| s.recipe.push_str("x = 1\n")),
        ("the recipe", |s| s.recipe_hash = String::new()),
        ("the contract's version", |s| s.contract += 1),
        ("the numeric domain", |s| s.domain = "bf16.sm90".to_owned()),
        ("the manifest", |s| s.manifest = "0".to_owned()),
        ("the steps of the schedule", |s| s.schedule.step += 1),
        ("the next learning rate", |s| s.schedule.lr *= 1.5),
        ("the next sequence", |s| s.data.sequence += 1),
        ("sequences of an epoch", |s| {
            s.data.sequences_per_epoch = None;
        }),
        ("the steps applied", |s| s.applied = s.step + 1),
    ];
    for (name, change) in changes {
        let mut changed = whole.clone();
        change(&mut changed.state);
        match resumed(&recipe, &changed).map(|_| ()) {
            Err(Error::Checkpoint(CheckpointError::OtherRun { what, .. })) => {
                assert_eq!(what, name);
            }
            other => panic!("{name}: {other:?}"),
        }
    }
    // Data of the same length but other text.
    let text = std::fs::read_to_string(folder.path().join("t.txt")).unwrap();
    std::fs::write(folder.path().join("t.txt"), text.to_uppercase()).unwrap();
    let other = resumed(&recipe, &whole).err().expect("other data");
    assert!(
        other.to_string().contains("the data's next batch"),
        "{other}"
    );
}

#[test]
fn the_loss_scale_comes_back_and_has_to_be_the_one_that_is_stated() {
    let folder = tempfile::tempdir().unwrap();
    let more = ["precision=f16", "precision.growth_interval=3"];
    let recipe = recipe(folder.path(), &more);
    let mut whole = open(&recipe);
    take(&mut whole, 4);
    let checkpoint = saved(&mut whole, folder.path());
    let scale = checkpoint.state.loss_scale.expect("a scale");
    assert_eq!((scale.scale, scale.good_steps), (131_072.0, 1));
    let mut second = resumed(&recipe, &checkpoint).unwrap();
    assert_eq!(take(&mut second, 4), take(&mut whole, 4));
    assert_eq!(digests(&mut second), digests(&mut whole));

    let mut changed = checkpoint.clone();
    changed.state.loss_scale = None;
    let refused = resumed(&recipe, &changed).err().expect("no scale");
    assert!(refused.to_string().contains("the loss scale"), "{refused}");
}

/// Twelve windows in two parts of six, over which a Mamba carries its state.
fn windows_recipe(folder: &Path) -> Recipe {
    recipe(folder, &[]);
    let text = "name = \"r\"\nseed = 5\nsteps = 12\nwarmup_steps = 2\n[model]\nfamily = \"mamba\"\n\
                vocab_size = 256\nd_model = 8\nn_layers = 1\nd_state = 5\n[data]\nsource = \"text\"\n\
                path = \"t.txt\"\nbatch = 2\nseq_len = 8\nvalidation = 0\nwindows = \"consecutive\"\n\
                [optimizer]\nlr = 1e-2\n[schedule]\nkind = \"constant\"\n";
    let file = folder.join("w.toml");
    std::fs::write(&file, text).unwrap();
    Recipe::from_path(&file).unwrap()
}

#[test]
fn consecutive_windows_carry_their_state_through_a_checkpoint_and_begin_anew_where_a_part_ends() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = windows_recipe(folder.path());
    let mut whole = open(&recipe);
    take(&mut whole, 8);
    let expected = digests(&mut whole);
    for cut in 1..8 {
        let mut first = open(&recipe);
        take(&mut first, cut);
        let stored = saved(&mut first, &folder.path().join(format!("at-{cut}")));
        let mut second = resumed(&recipe, &stored).unwrap();
        take(&mut second, 8 - cut);
        assert_eq!(digests(&mut second), expected, "cut after {cut} steps");
        // What a run carries decides its bits, but for the step that begins a part.
        let mut forgetful = resumed(&recipe, &stored).unwrap();
        let session = forgetful.trainer.session_mut();
        let empty = vec![0.0; session.recurrent_state().unwrap().len()];
        session.set_recurrent_state(&empty).unwrap();
        take(&mut forgetful, 8 - cut);
        let same = digests(&mut forgetful) == expected;
        assert_eq!(same, cut == 6, "state dropped after {cut} steps");
    }
}

#[test]
fn validation_between_steps_leaves_the_carried_state() {
    let folder = tempfile::tempdir().unwrap();
    let mut recipe = windows_recipe(folder.path());
    recipe.set_all(["data.validation=0.2"]).unwrap();
    let (mut plain, mut watched) = (open(&recipe), open(&recipe));
    for _ in 0..5 {
        take(&mut plain, 1);
        take(&mut watched, 1);
        watched.validate().unwrap();
    }
    assert_eq!(digests(&mut watched), digests(&mut plain));
}

#[test]
fn consecutive_windows_beside_a_model_without_state_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), &["data.windows=consecutive"]);
    let cpu = CpuBackend::new(CpuContext::new(SimdPath::detect(), 1).unwrap());
    let refused = Run::open(recipe, cpu).err().unwrap().to_string();
    assert!(refused.contains("data.windows"), "{refused}");
}
