//! Errors of golden files. A difference between bits is a verdict, not an error.

use thiserror::Error;

/// A golden that cannot be read, compared or blessed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GoldenError {
    /// The operating system refused to read or write a file.
    #[error("cannot {action} {path}: {source}")]
    File {
        action: &'static str,
        path: String,
        #[source]
        source: std::io::Error,
    },
    /// A line is not what the format asks for.
    #[error("{path}, line {line}: expected {expected}, found {found:?}")]
    Line {
        path: String,
        line: usize,
        expected: &'static str,
        found: String,
    },
    /// The file ends before a part that must be there.
    #[error("{path}: expected {expected}, found the end of the file")]
    Truncated {
        path: String,
        expected: &'static str,
    },
    /// The file was written by a format this version does not read.
    #[error("{path}: schema: expected {expected}, found {found}")]
    Schema {
        path: String,
        expected: u32,
        found: u32,
    },
    /// Nothing would be compared.
    #[error(
        "{path} holds no step, so comparing with it would show nothing; expected at least 1 step"
    )]
    Empty { path: String },
    /// The recipe of a golden is not beside it.
    #[error("{golden} has no recipe: expected {recipe}")]
    NoRecipe { golden: String, recipe: String },
    /// More steps are to be traced than run eagerly.
    #[error(
        "golden.trace_steps is {found}, expected at most warmup_steps, {expected}: replayed steps have no trace"
    )]
    TraceTooLong { expected: u64, found: u64 },
    /// Goldens are not blessed where nobody looks at them.
    #[error(
        "bless is refused because CI is set: a golden is blessed by a person who has looked at the difference"
    )]
    RefusedInCi,
    /// No reason was given.
    #[error("bless needs a reason: --because \"why these bits are right\"")]
    NoReason,
    /// The golden belongs to a numeric domain whose bits this build cannot produce.
    #[error(
        "{path}: domain {found} cannot be proven by this build, which proves {expected}; nothing was compared"
    )]
    Unprovable {
        path: String,
        expected: &'static str,
        found: String,
    },
    /// The text of a flip is not what `--flip` takes.
    #[error("flip {found:?}: expected STEP:TENSOR:INDEX:BIT, BIT from 0 to 31")]
    FlipText { found: String },
    /// A flip before a step that the golden does not cover would show nothing.
    #[error("flip before step {found}: expected a step from 0 to {last}")]
    FlipStep { last: u64, found: u64 },
    /// A file to compare is neither a golden nor a manifest.
    #[error("{path} is neither a golden nor a manifest")]
    UnknownKind { path: String },
    /// The two files to compare are of different kinds.
    #[error("{left} is a {left_kind} and {right} is a {right_kind}; expected two of one kind")]
    DifferentKinds {
        left: String,
        left_kind: &'static str,
        right: String,
        right_kind: &'static str,
    },
}
