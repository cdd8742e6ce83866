//! The built program, run as its users run it.

mod checks;
mod devices;
mod evaluation;
mod resume;
mod scripts;
mod train;

use std::process::Command;

/// What a run of the program left.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub out: String,
    pub err: String,
}

/// Runs the program.
pub fn bitstep(arguments: &[&str]) -> Ran {
    let output = Command::new(env!("CARGO_BIN_EXE_bitstep"))
        .args(arguments)
        .env_remove("CI")
        .output()
        .expect("the program starts");
    Ran {
        code: output.status.code().expect("the program ends by itself"),
        out: String::from_utf8(output.stdout).expect("text"),
        err: String::from_utf8(output.stderr).expect("text"),
    }
}
