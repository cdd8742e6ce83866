//! What the types rule out: each program of `compile_fail` must be refused by the compiler.

use std::process::Command;

/// The compiler whose words stand in the `.stderr` files; others say the same in other words.
const COMPILER: &str = "rustc 1.95.0 ";

#[test]
fn misuse_of_a_state_does_not_compile() {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let output = Command::new(rustc).arg("--version").output();
    let version = output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned());
    match version {
        Ok(version) if version.starts_with(COMPILER) => {
            trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
        }
        other => eprintln!("skipped: the texts are those of {COMPILER}, here is {other:?}"),
    }
}
