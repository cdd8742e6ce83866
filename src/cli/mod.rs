//! The command line: one file a subcommand. Only here are the environment and the clock read.

/// A line of results on standard output; a reader that goes away is no reason to panic.
macro_rules! say {
    ($($text:tt)*) => { super::output::line(format_args!($($text)*)) };
}

mod bench;
mod bench_report;
mod bench_stage;
mod bless;
mod device;
mod diff;
mod diff_devices;
mod doctor;
mod eval;
mod form;
mod generate;
mod inspect;
mod machine;
mod memory;
mod output;
mod parity;
mod precision;
mod progress;
mod recipe_options;
mod report;
mod resume;
mod roofline;
mod signals;
mod train;
mod training;
mod verify;

use clap::{Parser, Subcommand};

use crate::error::{Error, ExitCode};

const EXIT_CODES: &str = "Exit codes:
  0  done, or the two sides are identical
  1  the two sides differ
  2  the command line or the recipe is wrong
  3  a device, its driver or its libraries failed
  4  a data file, a model folder or a checkpoint could not be used
  5  training stopped on a non-finite loss or gradient norm
  6  training was interrupted by a signal after a finished step and was saved";

/// Deterministic training: the bits of a step are defined by a written contract.
#[derive(Parser, Debug)]
#[command(name = "bitstep", version, about, after_help = EXIT_CODES)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Train a recipe's model
    Train(train::Train),
    /// Evaluate a model on the data that a recipe sets aside
    Eval(eval::Eval),
    /// Continue a prompt with a model folder
    Generate(generate::Generate),
    /// Print what a step is made of: parameters, program, memory, manifest
    Inspect(inspect::Inspect),
    /// Run the recipes of goldens again and compare every bit
    Verify(verify::Verify),
    /// Write or replace the golden of a recipe, with the reason
    Bless(bless::Bless),
    /// Show the first differences of two goldens, of two manifests, or of two devices on a recipe
    Diff(diff::Diff),
    /// Hold a recorded PyTorch run against the same run here
    Parity(parity::Parity),
    /// Say what this machine has and which numeric domains it can prove
    Doctor(doctor::Doctor),
    /// Measure the step of a recipe
    Bench(bench::Bench),
    /// Draw runs as one page: losses, rates, norms, memory, and where two part
    Report(report::Report),
}

/// Runs the command line; the returned code is the process's.
pub fn main() -> ExitCode {
    let start = std::time::Instant::now();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help and version are printed to standard output and are no error.
            let _ = error.print();
            return match error.use_stderr() {
                true => ExitCode::Usage,
                false => ExitCode::Done,
            };
        }
    };
    let outcome = match arguments.command {
        Command::Train(command) => command.run(),
        Command::Eval(command) => command.run(),
        Command::Generate(command) => command.run(),
        Command::Inspect(command) => command.run(),
        Command::Verify(command) => command.run(),
        Command::Bless(command) => command.run(),
        Command::Diff(command) => command.run(),
        Command::Parity(command) => command.run(),
        Command::Doctor(command) => command.run(),
        Command::Bench(command) => command.run(start),
        Command::Report(command) => command.run(),
    };
    let code = outcome.unwrap_or_else(|error| {
        output::note(format_args!("error: {error}"));
        error.exit_code()
    });
    if !output::complete() {
        output::note("error: the results could not all be written to standard output");
        return ExitCode::Data;
    }
    code
}

/// What a subcommand gives: the code of an outcome that is not an error.
type Outcome = Result<ExitCode, Error>;
