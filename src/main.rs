//! The command line of bitstep.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(bitstep::cli::main().code())
}
