//! What the folder of a run says of its steps, read back.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::facts::{RunFacts, RunOutcome};
use super::run_folder::{FACTS, METRICS, OUTCOME};
use crate::error::RunError;

/// The number of a step is below this, so that it can be drawn exactly.
const MOST_STEPS: u64 = 1 << 53;

/// One line of `metrics.jsonl`. Numbers that are not finite are absent; keys of a later version are
/// passed over.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct RecordedStep {
    /// The number of the step, from 0.
    pub step: u64,
    pub loss: Option<f64>,
    /// The loss's bits, eight hex digits.
    pub loss_bits: String,
    /// The global gradient norm before the clip.
    pub grad_norm: Option<f64>,
    pub lr: Option<f64>,
    /// Whether weights and moments were updated.
    pub applied: bool,
    pub tokens_per_s: f64,
    /// `eager` or `replayed`.
    pub phase: String,
    /// The root over all parameters after the step, where it was recorded.
    #[serde(default)]
    pub root: Option<String>,
    #[serde(default)]
    pub validation: Option<RecordedValidation>,
    #[serde(default)]
    pub group_norms: BTreeMap<String, Option<f64>>,
}

/// An evaluation between steps.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct RecordedValidation {
    pub loss: Option<f64>,
    pub perplexity: Option<f64>,
    pub accuracy: f64,
}

/// The steps of a run and what stands beside them.
#[derive(Clone, Debug, PartialEq)]
pub struct RunHistory {
    pub folder: PathBuf,
    /// In the order of the file, which is that of their numbers.
    pub steps: Vec<RecordedStep>,
    /// Absent in folders of older versions.
    pub facts: Option<RunFacts>,
    /// Absent while the run goes on, and after one that was killed.
    pub outcome: Option<RunOutcome>,
}

impl RunHistory {
    /// Reads the folder of a run. A last line that was cut off, as a killed run leaves it, is passed over.
    ///
    /// # Errors
    /// [`RunError::History`] names file and line; [`RunError::NoSteps`] for a run without a step.
    pub fn read(folder: &Path) -> Result<Self, RunError> {
        let path = folder.join(METRICS);
        let text = read_text(&path)?.ok_or_else(|| no_steps(folder))?;
        let mut steps: Vec<RecordedStep> = Vec::new();
        for (index, line) in text.split_inclusive('\n').enumerate() {
            let fault = |message: String| RunError::History {
                file: path.display().to_string(),
                line: index + 1,
                message,
            };
            match serde_json::from_str::<RecordedStep>(line) {
                Ok(step) if step.step >= MOST_STEPS => {
                    let found = step.step;
                    return Err(fault(format!(
                        "expected a step below {MOST_STEPS}, found {found}"
                    )));
                }
                Ok(step) if steps.last().is_none_or(|last| last.step < step.step) => {
                    steps.push(step);
                }
                Ok(step) => {
                    let last = steps.last().map_or(0, |last| last.step);
                    let found = step.step;
                    return Err(fault(format!(
                        "expected a step after {last}, found {found}"
                    )));
                }
                Err(_) if !line.ends_with('\n') => {}
                Err(error) => return Err(fault(error.to_string())),
            }
        }
        let taken = match steps.last() {
            None => return Err(no_steps(folder)),
            Some(last) => last.step + 1,
        };
        let outcome: Option<RunOutcome> = read_json(&folder.join(OUTCOME))?;
        Ok(RunHistory {
            folder: folder.to_path_buf(),
            steps,
            facts: read_json(&folder.join(FACTS))?,
            // A run that went on and was killed since leaves the outcome of its first part.
            outcome: outcome.filter(|outcome| outcome.steps == taken),
        })
    }

    /// The evaluation with the lowest loss, the first of them, and the steps taken before it.
    pub fn best(&self) -> Option<(u64, RecordedValidation)> {
        let mut best: Option<(u64, RecordedValidation)> = None;
        for step in &self.steps {
            let Some(found) = step.validation else {
                continue;
            };
            let lowest = best.and_then(|(_, best)| best.loss);
            if let Some(loss) = found.loss
                && lowest.is_none_or(|lowest| loss < lowest)
            {
                best = Some((step.step + 1, found));
            }
        }
        best
    }

    /// The roots that were recorded, each after so many steps; the last one stands in the outcome.
    pub fn roots(&self) -> BTreeMap<u64, &str> {
        let recorded = self.steps.iter();
        let recorded = recorded.filter_map(|s| Some((s.step + 1, s.root.as_deref()?)));
        let last = self.outcome.iter().map(|o| (o.steps, o.root.as_str()));
        recorded.chain(last).collect()
    }
}

/// Where two runs part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parting {
    /// The first step, from 0, whose loss has other bits.
    pub loss: Option<u64>,
    /// The fewest steps taken after which the recorded roots differ, and both roots.
    pub root: Option<(u64, String, String)>,
    /// Steps that both have.
    pub steps: usize,
    /// Roots that both have.
    pub roots: usize,
}

/// Holds two runs against each other, step by step and root by root.
pub fn parting(left: &RunHistory, right: &RunHistory) -> Parting {
    let by_step: BTreeMap<u64, &RecordedStep> = right.steps.iter().map(|s| (s.step, s)).collect();
    let both = left.steps.iter();
    let both = both.filter_map(|step| Some((step, *by_step.get(&step.step)?)));
    let both: Vec<(&RecordedStep, &RecordedStep)> = both.collect();
    let other = both.iter().find(|(a, b)| a.loss_bits != b.loss_bits);
    let of_right = right.roots();
    let of_left = left.roots().into_iter();
    let roots: Vec<_> = of_left
        .filter_map(|(steps, root)| Some((steps, root, *of_right.get(&steps)?)))
        .collect();
    let root = roots.iter().find(|(_, a, b)| a != b);
    Parting {
        loss: other.map(|(step, _)| step.step),
        root: root.map(|(steps, a, b)| (*steps, (*a).to_owned(), (*b).to_owned())),
        steps: both.len(),
        roots: roots.len(),
    }
}

impl std::fmt::Display for Parting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (&self.root, self.loss) {
            (Some((steps, ..)), Some(loss)) => write!(
                f,
                "the roots part after {steps} steps, the losses at step {loss}"
            ),
            (Some((steps, ..)), None) => write!(f, "the roots part after {steps} steps"),
            (None, Some(loss)) => write!(
                f,
                "the losses part at step {loss}; no root recorded by both differs ({})",
                self.roots
            ),
            (None, None) => write!(
                f,
                "identical: the loss bits of {} steps and {} roots",
                self.steps, self.roots
            ),
        }
    }
}

fn no_steps(folder: &Path) -> RunError {
    RunError::NoSteps {
        folder: folder.display().to_string(),
    }
}

/// The text of a file; `None` when there is none.
fn read_text(path: &Path) -> Result<Option<String>, RunError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(RunError::Read {
            path: path.display().to_string(),
            source,
        }),
    }
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, RunError> {
    let Some(text) = read_text(path)? else {
        return Ok(None);
    };
    let parsed = serde_json::from_str(&text);
    parsed.map(Some).map_err(|error| RunError::History {
        file: path.display().to_string(),
        line: error.line(),
        message: error.to_string(),
    })
}

#[cfg(test)]
#[path = "history_tests.rs"]
mod tests;
