//! Errors of training data.

use thiserror::Error;

/// A data source that cannot be used, or a batch that does not fit the program.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DataError {
    /// The operating system refused to read a file.
    #[error("cannot read {path}: {source}")]
    Read {
        path: String,
        #[source]
        source: std::io::Error,
    },
}
