//! Standard output and error. A reader that goes away, as `head` does, is no reason to panic.

use std::fmt::Display;
use std::io::Write;

/// Writes a line of results to standard output.
pub fn line(text: impl Display) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// Writes a line about what is going on to standard error.
pub fn note(text: impl Display) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// A number of bytes as people read it.
pub fn bytes(count: usize) -> String {
    indicatif::BinaryBytes(count as u64).to_string()
}
