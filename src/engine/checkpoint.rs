//! From a run to a checkpoint and back.

use super::run::Run;
use super::session::Session;
use super::snapshot::Snapshot;
use super::step::Progress;
use crate::backend::Backend;
use crate::data::Batch;
use crate::error::{CheckpointError, Error};
use crate::io::checkpoint::{
    CheckpointState, DataCursor, FORMAT, RawTensor, ScaleState, SchedulePosition, StoredCheckpoint,
    StoredTensor,
};
use crate::io::tensors::StoredType;
use crate::layout::Region;
use crate::num;
use crate::num::element::decode;
use crate::op::Slot;
use crate::plan::Plan;
use crate::shape::{DType, Role, Shape};

/// A tensor that has to be kept, and where it lies.
#[derive(Clone, Debug, PartialEq)]
struct Kept {
    name: String,
    role: Role,
    slot: Slot,
    dtype: StoredType,
    shape: Shape,
    region: Region,
}

/// What a checkpoint holds, copied to the host, so that a writer needs nothing of the device.
#[derive(Clone, Debug)]
pub struct HostCopy {
    snapshot: Snapshot,
    kept: Vec<Kept>,
    state: CheckpointState,
}

impl HostCopy {
    /// What stands beside the tensors.
    pub fn state(&self) -> &CheckpointState {
        &self.state
    }

    /// The tensors: each parameter once, also where the head is the embedding, the two moments of
    /// each trained one, and what a step hands to the next.
    pub fn tensors(&self) -> Vec<RawTensor<'_>> {
        self.kept
            .iter()
            .map(|kept| RawTensor {
                name: &kept.name,
                role: kept.role.name(),
                dtype: kept.dtype,
                dims: kept.shape.dims(),
                bytes: self.snapshot.region(kept.region).unwrap_or_default(),
            })
            .collect()
    }
}

impl<B: Backend> Run<B> {
    /// Copies what a checkpoint holds; nothing changes. `recipe` is the text that the run's folder
    /// keeps.
    ///
    /// # Errors
    /// A device fault.
    pub fn host_copy(&mut self, recipe: &str) -> Result<HostCopy, Error> {
        let snapshot = self.trainer.session_mut().snapshot()?;
        let scale = self.trainer.session_mut().loss_scale()?;
        let mut state = self.expected_state(snapshot.progress, recipe);
        state.loss_scale = scale.map(ScaleState::from);
        Ok(HostCopy {
            kept: kept(self.trainer.session().plan()),
            snapshot,
            state,
        })
    }

    /// Goes on from a checkpoint of this recipe: parameters, moments, carried state and counters are
    /// those of its moment. Whatever does not fit is found before anything changes.
    ///
    /// # Errors
    /// [`CheckpointError::OtherRun`] names what differs; a tensor that is missing, has no place, or
    /// has another shape or type; a device fault.
    pub fn resume(&mut self, checkpoint: &StoredCheckpoint, recipe: &str) -> Result<(), Error> {
        let progress = Progress {
            taken: checkpoint.state.step,
            applied: checkpoint.state.applied,
        };
        self.check_state(checkpoint, recipe)?;
        let session = self.trainer.session_mut();
        let mut snapshot = session.snapshot()?;
        overlay(session, checkpoint, &mut snapshot)?;
        snapshot.progress = progress;
        // A program that was captured before ran over other counters; warm-up shows it anew.
        self.trainer.thaw();
        self.forget_start();
        Ok(self.trainer.session_mut().restore(&snapshot)?)
    }

    /// What a checkpoint at this place of this run states, tensors and loss scale apart.
    fn expected_state(&self, progress: Progress, recipe: &str) -> CheckpointState {
        let plan = self.trainer.session().plan();
        let step = progress.taken;
        let next = self.loader.batch_at(step).ok();
        CheckpointState {
            format: FORMAT,
            contract: num::VERSION,
            domain: plan.config.math.domain().to_owned(),
            step,
            applied: progress.applied,
            seed: self.recipe.seed,
            schedule: SchedulePosition {
                step,
                lr: self.schedule.lr(step),
            },
            data: DataCursor {
                sequence: step.saturating_mul(plan.config.batch as u64),
                sequences_per_epoch: self.loader.sequences_per_epoch(),
                next_batch: next.map(|batch| batch_digest(&batch).to_string()),
            },
            loss_scale: None,
            manifest: self.trainer.session().manifest().hash().to_string(),
            recipe_hash: blake3::hash(recipe.as_bytes()).to_string(),
            recipe: recipe.to_owned(),
            tensors: Vec::new(),
        }
    }

    fn check_state(
        &self,
        checkpoint: &StoredCheckpoint,
        recipe: &str,
    ) -> Result<(), CheckpointError> {
        let found = &checkpoint.state;
        let progress = Progress {
            taken: found.step,
            applied: found.applied,
        };
        let expected = self.expected_state(progress, recipe);
        let differs = |what, expected: String, found: String| CheckpointError::OtherRun {
            folder: checkpoint.folder.display().to_string(),
            what,
            expected,
            found,
        };
        if expected.recipe != found.recipe || expected.recipe_hash != found.recipe_hash {
            let (here, there) = first_difference(&expected.recipe, &found.recipe);
            return Err(differs("the recipe", here, there));
        }
        let facts = |s: &CheckpointState| {
            [
                ("the contract's version", s.contract.to_string()),
                ("the numeric domain", s.domain.clone()),
                ("the manifest", s.manifest.clone()),
                ("the seed", s.seed.to_string()),
                ("the steps of the schedule", s.schedule.step.to_string()),
                ("the next learning rate", s.schedule.lr.to_string()),
                ("the next sequence", s.data.sequence.to_string()),
                ("sequences of an epoch", text(s.data.sequences_per_epoch)),
                ("the data's next batch", text(s.data.next_batch.as_ref())),
            ]
        };
        for ((what, here), (_, there)) in facts(&expected).into_iter().zip(facts(found)) {
            if here != there {
                return Err(differs(what, here, there));
            }
        }
        if found.applied > found.step {
            let limit = format!("at most {}", found.step);
            let applied = found.applied.to_string();
            return Err(differs("the steps applied", limit, applied));
        }
        Ok(())
    }
}

/// Every tensor that has to be kept, in the order of the plan.
fn kept(plan: &Plan) -> Vec<Kept> {
    let of = |name: String, role: Role, slot: Slot| {
        let spec = plan.slots.spec(slot);
        Kept {
            name,
            role,
            slot,
            dtype: stored(spec.dtype),
            shape: spec.shape.clone(),
            region: plan.layout.region(slot),
        }
    };
    let mut all = Vec::new();
    for param in &plan.params {
        let role = match param.state {
            Some(_) => Role::Param,
            None => Role::Frozen,
        };
        all.push(of(param.name.clone(), role, param.slot));
        if let Some(state) = param.state {
            let first = format!("moment1.{}", param.name);
            let second = format!("moment2.{}", param.name);
            all.push(of(first, Role::Moment1, state.moment1));
            all.push(of(second, Role::Moment2, state.moment2));
        }
    }
    for (slot, def) in plan.slots.iter() {
        if def.view.is_none() && def.spec.role == Role::Carried {
            all.push(of(def.spec.name.clone(), Role::Carried, slot));
        }
    }
    all
}

/// Puts a checkpoint's tensors into a snapshot, and the shadows that follow from them.
fn overlay<B: Backend>(
    session: &Session<B>,
    checkpoint: &StoredCheckpoint,
    snapshot: &mut Snapshot,
) -> Result<(), Error> {
    let plan = session.plan();
    let folder = checkpoint.folder.display().to_string();
    let all = kept(plan);
    let known = |name: &String| all.iter().any(|kept| kept.name == *name);
    let stray = checkpoint.tensors.keys().filter(|name| !known(name));
    let stray: Vec<String> = stray.cloned().collect();
    if !stray.is_empty() {
        let tensors = stray;
        return Err(CheckpointError::UnexpectedTensors { folder, tensors }.into());
    }
    for kept in &all {
        let tensor = fitting(kept, checkpoint, &folder)?;
        copy(&tensor.bytes, kept.region, snapshot);
        if matches!(kept.role, Role::Param | Role::Frozen) {
            let values = decode(DType::F32, &tensor.bytes).unwrap_or_default();
            if let Some((region, bytes)) = plan.shadow_of(kept.slot, &values) {
                copy(&bytes, region, snapshot);
            }
        }
        if Some(kept.slot) == plan.inputs.loss_scale {
            check_scale(&tensor.bytes, checkpoint, &folder)?;
        }
    }
    Ok(())
}

/// The stored tensor of a place, when it is there and of its type and shape.
fn fitting<'a>(
    kept: &Kept,
    checkpoint: &'a StoredCheckpoint,
    folder: &str,
) -> Result<&'a StoredTensor, CheckpointError> {
    let (file, tensor) = (folder.to_owned(), kept.name.clone());
    let Some(found) = checkpoint.tensors.get(&kept.name) else {
        return Err(CheckpointError::StateMissing {
            folder: file,
            role: kept.role.name(),
            tensor,
        });
    };
    if found.dtype != kept.dtype {
        return Err(CheckpointError::WrongDtype {
            file,
            tensor,
            expected: kept.dtype.name(),
            found: found.dtype.name(),
        });
    }
    if found.shape != kept.shape || found.bytes.len() != kept.region.bytes {
        return Err(CheckpointError::WrongShape {
            file,
            tensor,
            expected: kept.shape.clone(),
            found: found.shape.clone(),
        });
    }
    Ok(found)
}

/// Holds the loss scale that is stated against its tensor.
fn check_scale(
    bytes: &[u8],
    checkpoint: &StoredCheckpoint,
    folder: &str,
) -> Result<(), CheckpointError> {
    let words = bytes.as_chunks::<4>().0;
    let word = |i: usize| words.get(i).map_or(0, |w| u32::from_le_bytes(*w));
    let found = ScaleState {
        scale: f32::from_bits(word(0)),
        good_steps: word(1),
        skipped: word(2),
    };
    match checkpoint.state.loss_scale {
        Some(stated) if stated == found => Ok(()),
        stated => Err(CheckpointError::OtherRun {
            folder: folder.to_owned(),
            what: "the loss scale",
            expected: format!("{found:?}"),
            found: format!("{stated:?}"),
        }),
    }
}

fn copy(bytes: &[u8], region: Region, snapshot: &mut Snapshot) {
    if let Some(place) = snapshot.region_mut(region)
        && place.len() == bytes.len()
    {
        place.copy_from_slice(bytes);
    }
}

/// How an element type is called in a file.
fn stored(dtype: DType) -> StoredType {
    match dtype {
        DType::F32 => StoredType::F32,
        DType::Bf16 => StoredType::Bf16,
        DType::F16 => StoredType::F16,
        DType::F64 => StoredType::F64,
        DType::I32 => StoredType::I32,
        DType::U32 => StoredType::U32,
        DType::U8 => StoredType::U8,
    }
}

/// The BLAKE3 of a batch: tokens, targets and weights.
fn batch_digest(batch: &Batch) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(bytemuck::cast_slice(&batch.input_ids));
    hasher.update(bytemuck::cast_slice(&batch.targets));
    hasher.update(bytemuck::cast_slice(&batch.weights));
    hasher.finalize()
}

/// The first lines in which two texts differ.
fn first_difference(left: &str, right: &str) -> (String, String) {
    let (mut a, mut b) = (left.lines(), right.lines());
    loop {
        match (a.next(), b.next()) {
            (None, None) => {
                return (
                    "one hash of both".to_owned(),
                    "a hash of another text".to_owned(),
                );
            }
            (x, y) if x == y => {}
            (x, y) => return (line(x), line(y)),
        }
    }
}

fn line(line: Option<&str>) -> String {
    format!("`{}`", line.unwrap_or("no more lines"))
}

fn text<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "none".to_owned(), |value| value.to_string())
}

#[cfg(test)]
#[path = "checkpoint_tests.rs"]
mod tests;
