use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::io::tensors::StoredType;

/// A disk on which so many bytes and operations are still possible; after that none is.
struct Budget {
    left: Arc<AtomicU64>,
    after: After,
}

#[derive(Clone, Copy, PartialEq)]
enum After {
    /// The process is gone: nothing more happens.
    Killed,
    /// The disk is full: writing fails, removing works.
    Full,
}

struct BudgetFile {
    file: Box<dyn DiskFile>,
    left: Arc<AtomicU64>,
}

/// Takes up to `wanted` from the budget.
fn spend(left: &AtomicU64, wanted: u64) -> u64 {
    let taken = |have: u64| Some(have - have.min(wanted));
    let had = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken);
    had.unwrap_or(0).min(wanted)
}

fn spent() -> io::Error {
    io::Error::from(io::ErrorKind::StorageFull)
}

impl DiskFile for BudgetFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let possible = spend(&self.left, bytes.len() as u64) as usize;
        self.file.write(&bytes[..possible])?;
        match possible == bytes.len() {
            true => Ok(()),
            false => Err(spent()),
        }
    }

    fn sync(&mut self) -> io::Result<()> {
        match spend(&self.left, 1) {
            1 => self.file.sync(),
            _ => Err(spent()),
        }
    }
}

impl Budget {
    fn one<T>(&self, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        match spend(&self.left, 1) {
            1 => act(),
            _ => Err(spent()),
        }
    }
}

impl Disk for Budget {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.one(|| LocalDisk.create_folder(path))
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let file = self.one(|| LocalDisk.create_file(path))?;
        let left = self.left.clone();
        Ok(Box::new(BudgetFile { file, left }))
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.one(|| LocalDisk.sync_folder(path))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.one(|| LocalDisk.rename(from, to))
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        match self.after {
            After::Full => LocalDisk.remove_folder(path),
            After::Killed => self.one(|| LocalDisk.remove_folder(path)),
        }
    }
}

fn state(step: u64) -> CheckpointState {
    CheckpointState {
        format: FORMAT,
        contract: 1,
        domain: "f32".to_owned(),
        step,
        applied: step,
        seed: 7,
        schedule: SchedulePosition { step, lr: 0.1 },
        data: DataCursor {
            sequence: 4 * step,
            sequences_per_epoch: Some(9),
            next_batch: None,
        },
        window: None,
        loss_scale: None,
        manifest: "m".to_owned(),
        recipe_hash: "h".to_owned(),
        recipe: "r".to_owned(),
        tensors: Vec::new(),
    }
}

const NAMES: [&str; 3] = ["w", "moment1.w", "moment2.w"];

fn put(disk: &dyn Disk, root: &Path, step: u64) -> Result<PathBuf, CheckpointError> {
    let bytes: Vec<Vec<u8>> = (0..3u64)
        .map(|i| (0..24u64).map(|b| (b * 5 + i + step) as u8).collect())
        .collect();
    let tensors: Vec<RawTensor<'_>> = NAMES
        .iter()
        .zip(&bytes)
        .map(|(name, bytes)| RawTensor {
            name,
            role: "param",
            dtype: StoredType::F32,
            dims: &[2, 3],
            bytes,
        })
        .collect();
    save(disk, root, state(step), &tensors)
}

fn newest_step(root: &Path) -> u64 {
    let found = newest(root, WhenDamaged::Refuse).expect("one that loads");
    found.checkpoint.state.step
}

#[test]
fn what_is_saved_is_read_back_and_every_tensor_has_its_digest() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path().join(CHECKPOINTS);
    let folder = put(&LocalDisk, &root, 12).unwrap();
    assert_eq!(folder, root.join("step-12"));
    let found = newest(&root, WhenDamaged::Refuse).unwrap();
    assert!(found.damaged.is_empty() && found.unfinished.is_empty());
    let read = found.checkpoint;
    assert_eq!(read.state.tensors.len(), 3);
    for record in &read.state.tensors {
        let tensor = &read.tensors[&record.name];
        assert_eq!(tensor.shape.dims(), [2, 3]);
        assert_eq!(record.blake3, blake3::hash(&tensor.bytes).to_string());
    }
    let mut stated = read.state.clone();
    stated.tensors.clear();
    assert_eq!(stated, state(12));
    // Other readers of safetensors read the file.
    let bytes = std::fs::read(folder.join(TENSORS)).unwrap();
    let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(theirs.tensor("w").unwrap().data(), read.tensors["w"].bytes);
}

#[test]
fn a_save_that_ends_anywhere_leaves_the_checkpoint_before_it() {
    // What a whole save spends: its bytes and its operations.
    let whole = {
        let root = tempfile::tempdir().unwrap();
        let left = Arc::new(AtomicU64::new(u64::MAX));
        let budget = Budget {
            left: left.clone(),
            after: After::Killed,
        };
        put(&budget, root.path(), 2).unwrap();
        u64::MAX - left.load(Ordering::Relaxed)
    };
    for after in [After::Killed, After::Full] {
        let mut failed = 0;
        for spent in (0..whole)
            .step_by((whole as usize / 60).max(1))
            .chain(whole - 30..=whole)
        {
            let root = tempfile::tempdir().unwrap();
            put(&LocalDisk, root.path(), 1).unwrap();
            let left = Arc::new(AtomicU64::new(spent));
            let saved = put(&Budget { left, after }, root.path(), 2);
            let unfinished = list(root.path()).unwrap().unfinished;
            match saved {
                Ok(_) => assert_eq!(newest_step(root.path()), 2),
                Err(CheckpointError::Write { .. }) => {
                    failed += 1;
                    // After the rename the new one is whole, though its name may not be on the disk.
                    assert!(newest_step(root.path()) >= 1);
                    assert!(after == After::Killed || unfinished.is_empty());
                }
                Err(other) => panic!("{other}"),
            }
            // What was left behind stands in no one's way.
            put(&LocalDisk, root.path(), 2).unwrap();
            assert_eq!(newest_step(root.path()), 2);
            assert!(list(root.path()).unwrap().unfinished.is_empty());
        }
        assert!(failed >= 50, "only {failed} saves were interrupted");
    }
}

#[test]
fn replacing_and_removing_interrupted_anywhere_leaves_no_part_under_a_whole_ones_name() {
    // The last step of a replacement is one of the last forty things it does.
    let interrupted = |spent: u64| {
        let root = tempfile::tempdir().unwrap();
        for step in [1, 2, 3] {
            put(&LocalDisk, root.path(), step).unwrap();
        }
        let left = Arc::new(AtomicU64::new(spent));
        let budget = Budget {
            left: left.clone(),
            after: After::Killed,
        };
        let done = put(&budget, root.path(), 3)
            .and_then(|_| prune(&budget, root.path(), 3, keep(Some(1), None)));
        let whole = list(root.path()).unwrap().whole;
        assert!(!whole.is_empty());
        for (_, folder) in whole {
            read(&folder).unwrap_or_else(|e| panic!("after {spent}: {e}"));
        }
        (done.is_ok(), spent - left.load(Ordering::Relaxed))
    };
    let (done, whole) = interrupted(1 << 40);
    assert!(done);
    for spent in whole - 40..whole {
        assert!(!interrupted(spent).0, "{spent}");
    }
}

fn keep(last: Option<u64>, every: Option<u64>) -> Keep {
    Keep {
        last,
        every,
        best: None,
    }
}

#[test]
fn the_newest_and_the_multiples_are_kept() {
    let kept_of = |keep: Keep| -> Vec<u64> {
        let root = tempfile::tempdir().unwrap();
        for step in 1..=9 {
            put(&LocalDisk, root.path(), step).unwrap();
        }
        prune(&LocalDisk, root.path(), 8, keep).unwrap();
        let whole = list(root.path()).unwrap().whole;
        whole.into_iter().map(|(step, _)| step).collect()
    };
    assert_eq!(kept_of(keep(Some(2), None)), [7, 8, 9]);
    assert_eq!(kept_of(keep(Some(1), Some(4))), [4, 8, 9]);
    assert_eq!(kept_of(keep(None, Some(4))).len(), 9);
    let with_best = Keep {
        best: Some(3),
        ..keep(Some(1), None)
    };
    assert_eq!(kept_of(with_best), [3, 8, 9]);
}

#[test]
fn steps_are_ordered_as_numbers_and_other_names_are_passed_over() {
    let root = tempfile::tempdir().unwrap();
    assert!(matches!(
        newest(&root.path().join("none"), WhenDamaged::Refuse),
        Err(CheckpointError::NoCheckpoint { .. })
    ));
    for name in ["step-", "step-07", "step--1", "step-x", "damaged-step-99"] {
        std::fs::create_dir(root.path().join(name)).unwrap();
    }
    for step in [9, 10, 2] {
        put(&LocalDisk, root.path(), step).unwrap();
    }
    assert_eq!(newest_step(root.path()), 10);
    std::fs::create_dir(root.path().join(".writing-step-11")).unwrap();
    let found = newest(root.path(), WhenDamaged::Refuse).unwrap();
    assert_eq!(found.unfinished, [root.path().join(".writing-step-11")]);
    clear_unfinished(&LocalDisk, &found.unfinished).unwrap();
    assert!(list(root.path()).unwrap().unfinished.is_empty());
}

/// Changes a file of the newest of two checkpoints; it has to be refused, by name, and the one
/// before has to be found when it is asked for.
fn assert_found_damaged(file: &str, damage: impl Fn(&mut Vec<u8>)) -> CheckpointError {
    let root = tempfile::tempdir().unwrap();
    put(&LocalDisk, root.path(), 1).unwrap();
    let folder = put(&LocalDisk, root.path(), 2).unwrap();
    let path = folder.join(file);
    let mut bytes = std::fs::read(&path).unwrap();
    damage(&mut bytes);
    match bytes.is_empty() {
        true => std::fs::remove_file(&path).unwrap(),
        false => std::fs::write(&path, &bytes).unwrap(),
    }
    let reason = match newest(root.path(), WhenDamaged::Refuse) {
        Err(CheckpointError::Damaged {
            folder: named,
            reason,
        }) => {
            assert_eq!(named, folder.display().to_string());
            *reason
        }
        other => panic!("{other:?}"),
    };
    let found = newest(root.path(), WhenDamaged::UsePrevious).unwrap();
    assert_eq!(found.checkpoint.state.step, 1);
    assert_eq!(found.damaged[0].0, folder);
    let aside = set_aside(&LocalDisk, root.path(), &folder).unwrap();
    assert!(aside.ends_with("damaged-step-2"));
    assert_eq!(newest_step(root.path()), 1);
    reason
}

#[test]
fn each_damaged_part_is_named() {
    let missing = |bytes: &mut Vec<u8>| bytes.clear();
    for file in [TENSORS, STATE, STATE_DIGEST] {
        let reason = assert_found_damaged(file, missing);
        assert!(
            matches!(&reason, CheckpointError::Read { path, .. } if path.ends_with(file)),
            "{reason}"
        );
        // A file cut off anywhere.
        for share in 1..20 {
            let reason = assert_found_damaged(file, |b| b.truncate((b.len() * share / 20).max(1)));
            assert!(reason.to_string().contains("step-2"), "{reason}");
        }
    }
    for file in [STATE, STATE_DIGEST] {
        let reason = assert_found_damaged(file, |bytes| bytes[20] ^= 1);
        assert!(
            matches!(&reason, CheckpointError::FileDigest { file, .. } if file.ends_with(STATE)),
            "{reason}"
        );
    }
    // Tensors stand in the order of their names, the last one last.
    for (back, name) in [(1, "w"), (25, "moment2.w"), (49, "moment1.w")] {
        let reason = assert_found_damaged(TENSORS, |bytes| {
            let at = bytes.len() - back;
            bytes[at] ^= 1;
        });
        assert!(
            matches!(&reason, CheckpointError::TensorDigest { tensor, .. } if tensor == name),
            "{reason}"
        );
    }
    let longer = assert_found_damaged(TENSORS, |bytes| bytes.push(0));
    assert!(matches!(longer, CheckpointError::TrailingBytes { .. }));
}

/// Changes what the newest checkpoint states, and the digest of it.
fn restated(root: &Path, change: impl Fn(&mut serde_json::Value)) -> CheckpointError {
    let folder = put(&LocalDisk, root, 1).unwrap();
    let text = std::fs::read(folder.join(STATE)).unwrap();
    let mut value = serde_json::from_slice(&text).unwrap();
    change(&mut value);
    let text = serde_json::to_vec(&value).unwrap();
    std::fs::write(folder.join(STATE), &text).unwrap();
    let digest = format!("{}\n", blake3::hash(&text));
    std::fs::write(folder.join(STATE_DIGEST), digest).unwrap();
    read(&folder).unwrap_err()
}

#[test]
fn a_state_that_tells_of_other_tensors_or_has_another_form_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let records =
        |value: &mut serde_json::Value| value["tensors"].as_array_mut().expect("records").clone();
    let stray = restated(root.path(), |value| {
        let mut all = records(value);
        all.pop();
        value["tensors"] = all.into();
    });
    assert!(
        matches!(stray, CheckpointError::UnexpectedTensors { tensors, .. } if tensors == ["w"])
    );
    let missing = restated(root.path(), |value| {
        value["tensors"][0]["name"] = "x".into()
    });
    assert!(matches!(missing, CheckpointError::MissingTensor { tensor, .. } if tensor == "x"));
    let form = restated(root.path(), |value| value["format"] = 2.into());
    assert!(matches!(form, CheckpointError::OtherRun { .. }), "{form}");
    let key = restated(root.path(), |value| value["more"] = 2.into());
    assert!(key.to_string().contains("more"), "{key}");
}

#[test]
fn tensors_that_do_not_fit_are_not_written() {
    let root = tempfile::tempdir().unwrap();
    let tensor = RawTensor {
        name: "w",
        role: "param",
        dtype: StoredType::F32,
        dims: &[2],
        bytes: &[0; 8],
    };
    let twice = save(&LocalDisk, root.path(), state(1), &[tensor, tensor]).unwrap_err();
    assert!(matches!(twice, CheckpointError::DuplicateTensor { .. }));
    let short = RawTensor {
        bytes: &[0; 4],
        ..tensor
    };
    let short = save(&LocalDisk, root.path(), state(1), &[short]).unwrap_err();
    assert!(matches!(short, CheckpointError::ValueCount { .. }));
    assert_eq!(list(root.path()).unwrap(), Listing::default());
}

#[test]
fn the_header_of_many_tensors_is_written_whole() {
    let folder = tempfile::tempdir().unwrap();
    // More text than a width of the standard library's formatting can have.
    let names: Vec<String> = (0..2000).map(|i| format!("tensor.{i:04}")).collect();
    let tensors: Vec<RawTensor<'_>> = names
        .iter()
        .map(|name| RawTensor {
            name,
            role: "parameter",
            dtype: StoredType::U8,
            dims: &[1],
            bytes: &[7],
        })
        .collect();
    let saved = save(&LocalDisk, folder.path(), state(1), &tensors).unwrap();
    let length = std::fs::read(saved.join(TENSORS)).unwrap()[..8].to_vec();
    assert!(u64::from_le_bytes(length.try_into().unwrap()) > u64::from(u16::MAX));
    let found = read(&saved).unwrap();
    assert_eq!(found.tensors.len(), names.len());
    assert!(found.tensors.values().all(|tensor| tensor.bytes == [7]));
}
