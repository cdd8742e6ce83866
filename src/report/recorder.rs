//! Where the numbers of each step go: `metrics.jsonl`, and TensorBoard event files where the recipe asks.

use super::{EventsWriter, MetricsLine, MetricsWriter};
use crate::error::RunError;

/// The files that take a line a step.
#[derive(Debug)]
pub struct Recorder {
    metrics: MetricsWriter,
    events: Option<EventsWriter>,
}

impl Recorder {
    /// A recorder into these files.
    pub fn new(metrics: MetricsWriter, events: Option<EventsWriter>) -> Self {
        Recorder { metrics, events }
    }

    /// Appends the numbers of a step that ended at `wall_s`, in seconds since the beginning of 1970.
    ///
    /// # Errors
    /// [`RunError::Write`] names the file.
    pub fn write(&mut self, line: &MetricsLine, wall_s: f64) -> Result<(), RunError> {
        if let Some(events) = &mut self.events {
            events.write(line, wall_s)?;
        }
        self.metrics.write(line)?;
        match (&mut self.events, self.metrics.is_flushed()) {
            (Some(events), true) => events.flush(),
            _ => Ok(()),
        }
    }

    /// Hands everything written so far to the operating system.
    ///
    /// # Errors
    /// [`RunError::Write`] names the file.
    pub fn flush(&mut self) -> Result<(), RunError> {
        if let Some(events) = &mut self.events {
            events.flush()?;
        }
        self.metrics.flush()
    }
}
