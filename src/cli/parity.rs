//! `bitstep parity`.

use std::path::PathBuf;

use clap::Args;

use super::Outcome;
use super::device::DeviceArguments;
use super::precision::PrecisionArgument;
use crate::backend::Backend;
use crate::error::ExitCode;
use crate::parity::{self, Kind, ParityReport, Reference, Row, Tolerances};

/// Arguments of `bitstep parity`.
#[derive(Args, Debug)]
pub struct Parity {
    /// A folder with config.json, model.safetensors, reference.json and reference.safetensors, as
    /// benches/record_reference.py writes it
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    #[command(flatten)]
    device: DeviceArguments,
    #[command(flatten)]
    precision: PrecisionArgument,
    #[command(flatten)]
    tolerances: ToleranceArguments,
    /// Print every comparison, not only the worst of each kind
    #[arg(long)]
    verbose: bool,
}

/// The largest relative errors accepted; the defaults follow from the precision.
#[derive(Args, Debug)]
struct ToleranceArguments {
    /// Largest relative error of the logits of step 0
    #[arg(long, value_name = "X")]
    tolerance_logits: Option<f64>,
    /// Largest relative error of each gradient of step 0, before clipping
    #[arg(long, value_name = "X")]
    tolerance_gradients: Option<f64>,
    /// Largest relative error of each step's loss
    #[arg(long, value_name = "X")]
    tolerance_losses: Option<f64>,
    /// Largest relative error of each step's gradient norm, before clipping
    #[arg(long, value_name = "X")]
    tolerance_norms: Option<f64>,
    /// Largest error of each parameter after the last step, relative to how far it moved
    #[arg(long, value_name = "X")]
    tolerance_change: Option<f64>,
}

impl Parity {
    /// Runs the recorded steps and prints the errors.
    pub fn run(self) -> Outcome {
        let backend = self.device.open()?;
        let reference = Reference::open(&self.folder)?;
        let device = backend.info().description;
        let math = self.precision.math();
        let (t, usual) = (&self.tolerances, Tolerances::of_math(math));
        let tolerances = Tolerances {
            logits: t.tolerance_logits.unwrap_or(usual.logits),
            gradients: t.tolerance_gradients.unwrap_or(usual.gradients),
            losses: t.tolerance_losses.unwrap_or(usual.losses),
            norms: t.tolerance_norms.unwrap_or(usual.norms),
            change: t.tolerance_change.unwrap_or(usual.change),
        };
        let report = parity::run(&reference, math, backend, &tolerances)?;
        let [steps, batch, seq_len] = reference.sizes();
        say!(
            "{}: {steps} steps of {batch} x {seq_len} tokens on {device}, against the record",
            self.folder.display()
        );
        if self.verbose {
            print_rows(report.rows.iter());
        } else {
            print_rows(report.rows.iter().filter(|row| !row.holds()));
        }
        print_summary(&report);
        Ok(match report.holds() {
            true => ExitCode::Done,
            false => ExitCode::Differs,
        })
    }
}

fn print_rows<'a>(rows: impl Iterator<Item = &'a Row>) {
    let mut rows = rows.peekable();
    if rows.peek().is_some() {
        say!(
            "{:<10} {:>9} {:>9}  tensor or step",
            "kind",
            "error",
            "allowed"
        );
    }
    for row in rows {
        say!(
            "{:<10} {:>9.2e} {:>9.2e}  {}{}",
            row.kind.name(),
            row.error,
            row.tolerance,
            row.name,
            if row.holds() { "" } else { "  BEYOND" }
        );
    }
}

fn print_summary(report: &ParityReport) {
    say!("the worst relative error of each kind:");
    say!(
        "{:<10} {:>9} {:>9} {:>9}  at",
        "kind",
        "error",
        "allowed",
        "holding"
    );
    for kind in Kind::ALL {
        let Some(worst) = report.worst(kind) else {
            continue;
        };
        let all = report.of(kind).count();
        let holding = report.of(kind).filter(|row| row.holds()).count();
        let holding = format!("{holding}/{all}");
        say!(
            "{:<10} {:>9.2e} {:>9.2e} {holding:>9}  {}",
            kind.name(),
            worst.error,
            worst.tolerance,
            worst.name
        );
    }
    let beyond = report.rows.iter().filter(|row| !row.holds()).count();
    match beyond {
        0 => say!("parity holds: {} comparisons", report.rows.len()),
        _ => say!(
            "parity fails: {beyond} of {} comparisons are beyond their tolerance",
            report.rows.len()
        ),
    }
}
