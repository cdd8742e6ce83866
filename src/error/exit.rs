//! The exit codes of the command line, stated once.

/// What the process tells its caller; the numbers are part of the public interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ExitCode {
    /// Done, or the two sides compared are identical.
    Done = 0,
    /// The two sides compared differ.
    Differs = 1,
    /// The command line or the recipe is wrong.
    Usage = 2,
    /// A device, its driver or its libraries failed.
    Device = 3,
    /// A data file, a model folder or a checkpoint could not be used.
    Data = 4,
    /// Training stopped on a non-finite loss or gradient norm.
    NonFinite = 5,
    /// Training was interrupted after a finished step, and what could be saved was.
    Interrupted = 6,
}

impl ExitCode {
    /// The number the process exits with.
    pub fn code(self) -> u8 {
        self as u8
    }
}
