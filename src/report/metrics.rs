//! The metrics of a run: one JSON object a line, one line a step.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use serde::Serialize;

use super::group_norms::GroupNorms;
use crate::engine::StepReport;
use crate::engine::run::Validation;
use crate::error::RunError;
use crate::io::atomic::write_whole;
use crate::op::step_values::canonical_bits;

/// Lines between two flushes.
const FLUSH_EVERY: u32 = 50;

/// How a step ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Call by call.
    Eager,
    /// As one proven graph.
    Replayed,
}

/// One line. A loss or norm that is not finite is `null` in JSON; `loss_bits` still tells which.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MetricsLine {
    /// The number of the step, from 0.
    pub step: u64,
    /// The mean loss over the scored targets, in nats, before the update.
    pub loss: f32,
    /// The loss's bits, eight hex digits.
    pub loss_bits: String,
    /// The global gradient norm before the clip.
    pub grad_norm: f32,
    /// The learning rate used.
    pub lr: f64,
    /// Whether weights and moments were updated.
    pub applied: bool,
    /// Why not: the names of the reasons; empty when they were.
    pub dropped: Vec<String>,
    /// Targets that were scored.
    pub scored: usize,
    /// Tokens of the batch over the time of the step.
    pub tokens_per_s: f64,
    /// Time since the first step began, in seconds.
    pub elapsed_s: f64,
    /// How the step ran.
    pub phase: Phase,
    /// The root over all parameters after the step, where the recipe asks for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub root: Option<String>,
    /// What the data set aside came to after the step, where the recipe asks for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation: Option<ValidationMetrics>,
    /// The gradient norm of each group of parameters before the clip, where the recipe asks for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_norms: Option<GroupNorms>,
}

/// What an evaluation between steps has found.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ValidationMetrics {
    /// The mean loss over the scored targets, in nats.
    pub loss: f64,
    /// `exp(loss)`.
    pub perplexity: f64,
    /// The share of scored targets whose logit is the row's maximum.
    pub accuracy: f64,
    /// Targets that were scored.
    pub scored: usize,
}

impl From<Validation> for ValidationMetrics {
    fn from(found: Validation) -> Self {
        ValidationMetrics {
            loss: found.loss(),
            perplexity: found.perplexity(),
            accuracy: found.accuracy(),
            scored: found.scored,
        }
    }
}

/// When a step ran, by a clock that is not this module's to read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Seconds that the step took.
    pub step_s: f64,
    /// Seconds since the first step began.
    pub elapsed_s: f64,
    /// Tokens of the batch.
    pub tokens: usize,
}

impl MetricsLine {
    /// The line of a step.
    pub fn new(report: &StepReport, phase: Phase, timing: Timing) -> Self {
        let names = report.dropped.iter_names();
        MetricsLine {
            step: report.step,
            loss: report.loss,
            loss_bits: format!("{:08x}", canonical_bits(report.loss)),
            grad_norm: report.grad_norm,
            lr: report.lr,
            applied: report.applied(),
            dropped: names.map(|(name, _)| name.to_lowercase()).collect(),
            scored: report.scored,
            tokens_per_s: timing.tokens as f64 / timing.step_s.max(1e-9),
            elapsed_s: timing.elapsed_s,
            phase,
            root: None,
            validation: None,
            group_norms: None,
        }
    }

    /// The line with the root over all parameters after its step, if there is one.
    pub fn with_root(self, root: Option<blake3::Hash>) -> Self {
        let root = root.map(|root| root.to_hex().to_string());
        MetricsLine { root, ..self }
    }
}

/// Writes `metrics.jsonl`. Lines reach the file at least every 50 steps and at the end.
#[derive(Debug)]
pub struct MetricsWriter {
    path: String,
    file: BufWriter<File>,
    waiting: u32,
}

impl MetricsWriter {
    /// Creates the file; one that exists already is refused.
    ///
    /// # Errors
    /// [`RunError::Write`] names the file.
    pub fn create(path: &Path) -> Result<Self, RunError> {
        let name = path.display().to_string();
        match File::create_new(path) {
            Ok(file) => Ok(MetricsWriter {
                path: name,
                file: BufWriter::new(file),
                waiting: 0,
            }),
            Err(source) => Err(RunError::Write { path: name, source }),
        }
    }

    /// Opens the file of a run that goes on after `taken` steps: lines of later steps, and a last
    /// one that was cut off, go; the run writes them again. Without a file one is created.
    ///
    /// # Errors
    /// [`RunError::Write`] names the file.
    pub fn resume(path: &Path, taken: u64) -> Result<Self, RunError> {
        let failed = |source| RunError::Write {
            path: path.display().to_string(),
            source,
        };
        let text = match std::fs::read_to_string(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Self::create(path),
            text => text.map_err(failed)?,
        };
        let before = |line: &&str| {
            let value: Option<serde_json::Value> = serde_json::from_str(line).ok();
            let step = value.and_then(|value| value.get("step")?.as_u64());
            line.ends_with('\n') && step.is_some_and(|step| step < taken)
        };
        let kept: String = text.split_inclusive('\n').take_while(before).collect();
        write_whole(path, kept.as_bytes()).map_err(failed)?;
        let file = File::options().append(true).open(path).map_err(failed)?;
        Ok(MetricsWriter {
            path: path.display().to_string(),
            file: BufWriter::new(file),
            waiting: 0,
        })
    }

    /// Appends a line.
    ///
    /// # Errors
    /// [`RunError::Write`] names the file.
    pub fn write(&mut self, line: &MetricsLine) -> Result<(), RunError> {
        let text = serde_json::to_string(line).map_err(std::io::Error::from);
        let written = text.and_then(|text| writeln!(self.file, "{text}"));
        written.map_err(|source| self.failed(source))?;
        self.waiting += 1;
        // A line that says why a run ends must not wait.
        match self.waiting >= FLUSH_EVERY || !line.applied {
            true => self.flush(),
            false => Ok(()),
        }
    }

    /// Hands everything written so far to the operating system.
    ///
    /// # Errors
    /// [`RunError::Write`] names the file.
    pub fn flush(&mut self) -> Result<(), RunError> {
        self.waiting = 0;
        self.file.flush().map_err(|source| self.failed(source))
    }

    /// Whether no line waits in memory.
    pub fn is_flushed(&self) -> bool {
        self.waiting == 0
    }

    fn failed(&self, source: std::io::Error) -> RunError {
        RunError::Write {
            path: self.path.clone(),
            source,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resumed_file_loses_the_lines_of_steps_that_come_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.jsonl");
        let line = |step| format!("{{\"step\":{step},\"loss\":1.0}}\n");
        let whole: String = (0..4).map(line).collect();
        for (text, taken, kept) in [
            (whole.clone(), 2, 2),
            (whole.clone(), 4, 4),
            (format!("{whole}{{\"step\":4,\"lo"), 9, 4),
            (String::new(), 3, 0),
        ] {
            std::fs::write(&path, text).unwrap();
            drop(MetricsWriter::resume(&path, taken).unwrap());
            let expected: String = (0..kept).map(line).collect();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), expected);
        }
        std::fs::remove_file(&path).unwrap();
        drop(MetricsWriter::resume(&path, 3).unwrap());
        assert!(path.exists());
    }
    use crate::op::step_values::Dropped;

    fn report(step: u64, loss: f32, dropped: Dropped) -> StepReport {
        StepReport {
            step,
            loss,
            grad_norm: 2.0,
            clip_coefficient: 0.5,
            dropped,
            lr: 1e-3,
            scored: 7,
        }
    }

    fn line(step: u64, loss: f32, dropped: Dropped) -> MetricsLine {
        let timing = Timing {
            step_s: 0.5,
            elapsed_s: 1.5,
            tokens: 64,
        };
        MetricsLine::new(&report(step, loss, dropped), Phase::Replayed, timing)
    }

    #[test]
    fn a_line_states_the_bits_and_the_reason() {
        let text = serde_json::to_string(&line(3, 1.5, Dropped::empty())).unwrap();
        assert_eq!(
            text,
            r#"{"step":3,"loss":1.5,"loss_bits":"3fc00000","grad_norm":2.0,"lr":0.001,"applied":true,"dropped":[],"scored":7,"tokens_per_s":128.0,"elapsed_s":1.5,"phase":"replayed"}"#
        );
        let text = serde_json::to_string(&line(4, f32::NAN, Dropped::NON_FINITE_LOSS)).unwrap();
        assert!(
            text.contains(r#""loss":null,"loss_bits":"7fc00000""#),
            "{text}"
        );
        assert!(
            text.contains(r#""applied":false,"dropped":["non_finite_loss"]"#),
            "{text}"
        );
    }

    #[test]
    fn a_root_stands_at_the_end_of_its_line() {
        let root = blake3::hash(b"weights");
        let text = serde_json::to_string(&line(3, 1.5, Dropped::empty()).with_root(Some(root)));
        let text = text.unwrap();
        let end = format!(r#""phase":"replayed","root":"{}"}}"#, root.to_hex());
        assert!(text.ends_with(&end), "{text}");
    }

    #[test]
    fn lines_reach_the_file_every_fifty_steps_when_a_step_is_dropped_and_on_flush() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let lines = || std::fs::read_to_string(&path).unwrap().lines().count();
        let mut writer = MetricsWriter::create(&path).unwrap();
        for step in 0..50 {
            writer.write(&line(step, 1.0, Dropped::empty())).unwrap();
        }
        assert_eq!(lines(), 50);
        writer.write(&line(50, 1.0, Dropped::empty())).unwrap();
        writer.write(&line(51, 1.0, Dropped::SPIKE)).unwrap();
        assert_eq!(lines(), 52);
        writer.write(&line(52, 1.0, Dropped::empty())).unwrap();
        writer.flush().unwrap();
        assert_eq!(lines(), 53);
    }

    #[test]
    fn a_file_that_exists_or_a_full_disk_is_an_error_that_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        MetricsWriter::create(&path).unwrap();
        match MetricsWriter::create(&path) {
            Err(RunError::Write { path: found, .. }) => {
                assert_eq!(found, path.display().to_string());
            }
            other => panic!("{other:?}"),
        }
        // The device that is always full exists on Linux only.
        if let Ok(file) = File::options().write(true).open("/dev/full") {
            let mut writer = MetricsWriter {
                path: "m.jsonl".into(),
                file: BufWriter::new(file),
                waiting: 0,
            };
            writer.write(&line(0, 1.0, Dropped::empty())).unwrap();
            match writer.flush() {
                Err(RunError::Write { path, .. }) => assert_eq!(path, "m.jsonl"),
                other => panic!("{other:?}"),
            }
        }
    }
}
