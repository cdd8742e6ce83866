//! Standard output and error. A reader that goes away, as `head` does, is no reason to panic.

use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a line of results was lost to something else than a reader that went away.
static LOST: AtomicBool = AtomicBool::new(false);

/// Writes a line of results to standard output.
pub fn line(text: impl Display) {
    keep(writeln!(std::io::stdout(), "{text}"));
}

fn keep(written: std::io::Result<()>) {
    if written.is_err_and(|e| e.kind() != ErrorKind::BrokenPipe) {
        LOST.store(true, Ordering::Relaxed);
    }
}

/// Writes out what is still held back; whether every line of results was written.
pub fn complete() -> bool {
    keep(std::io::stdout().flush());
    !LOST.load(Ordering::Relaxed)
}

/// Writes a line about what is going on to standard error.
pub fn note(text: impl Display) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// A number of bytes as people read it.
pub fn bytes(count: usize) -> String {
    indicatif::BinaryBytes(count as u64).to_string()
}
