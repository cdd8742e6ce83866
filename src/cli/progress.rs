//! The progress of a run: a bar on a terminal, a line now and then elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressStyle};

use super::output;
use crate::engine::run::Validation;
use crate::report::MetricsLine;

/// Time between two lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Where progress is shown.
pub enum Progress {
    Quiet,
    Bar(ProgressBar),
    Lines {
        steps: u64,
        /// Steps taken before this process.
        before: u64,
        last: Option<Instant>,
    },
}

impl Progress {
    /// Progress over `steps` steps, of which `before` are taken already, on a terminal if standard
    /// error is one.
    pub fn shown(steps: u64, before: u64) -> Self {
        if !std::io::stderr().is_terminal() {
            return Progress::Lines {
                steps,
                before,
                last: None,
            };
        }
        let bar = ProgressBar::new(steps).with_position(before);
        bar.reset_eta();
        let template = "{bar:24} {pos}/{len}  {msg}  ETA {eta}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Progress::Bar(bar)
    }

    /// Shows a step that was taken; `mean_tokens_per_s` is over the run.
    pub fn step(&mut self, metrics: &MetricsLine, mean_tokens_per_s: f64) {
        let message = format!(
            "loss {:.4}  lr {:.2e}  {mean_tokens_per_s:.0} tokens/s",
            metrics.loss, metrics.lr
        );
        let taken = metrics.step + 1;
        match self {
            Progress::Quiet => {}
            Progress::Bar(bar) => {
                bar.set_position(taken);
                bar.set_message(message);
            }
            Progress::Lines {
                steps,
                before,
                last,
            } => {
                let due = last.is_none_or(|last| last.elapsed() >= LINE_EVERY);
                if due || taken == *steps {
                    *last = Some(Instant::now());
                    let here = taken.saturating_sub(*before).max(1);
                    let left =
                        metrics.elapsed_s / here as f64 * (*steps - taken.min(*steps)) as f64;
                    let left = Duration::try_from_secs_f64(left).unwrap_or(Duration::MAX);
                    let left = HumanDuration(left);
                    output::note(format_args!(
                        "step {taken}/{steps}  {message}  ETA {left:#}"
                    ));
                }
            }
        }
    }

    /// Shows what the data set aside came to after so many steps.
    pub fn evaluated(&self, taken: u64, found: &Validation) {
        if let Progress::Bar(_) | Progress::Lines { .. } = self {
            self.note(&format!(
                "after {taken} steps: validation loss {:.4}, perplexity {:.4}, {:.1} % right",
                found.loss(),
                found.perplexity(),
                100.0 * found.accuracy()
            ));
        }
    }

    /// Says something without disturbing the bar; said even when progress is quiet.
    pub fn note(&self, text: &str) {
        match self {
            Progress::Bar(bar) => bar.suspend(|| output::note(text)),
            Progress::Quiet | Progress::Lines { .. } => output::note(text),
        }
    }

    /// Leaves the last state on the screen.
    pub fn end(&self) {
        if let Progress::Bar(bar) = self {
            bar.abandon();
        }
    }
}
