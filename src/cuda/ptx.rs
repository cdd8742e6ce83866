//! The committed PTX, by file stem. A test holds the list equal to the folder.

/// `(stem, text)` of every file.
pub const PTX: &[(&str, &str)] = &[];
