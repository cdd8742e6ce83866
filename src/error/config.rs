//! Errors of recipes and model configurations.

use std::fmt;
use std::ops::Bound;

use thiserror::Error;

use super::ExitCode;

/// What a key accepts. It is a value of its own, so that the table of keys and the error texts
/// state one and the same rule.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Expected {
    /// Text that is not empty.
    Text,
    /// Text that can name a file: letters, digits, `-`, `_` and `.`, not starting with `.`.
    Name,
    /// `true` or `false`.
    Flag,
    /// A table of keys.
    Section,
    /// An integer from `min` to `max`, both included.
    Integer { min: i64, max: i64 },
    /// A finite number between two bounds.
    Number { low: Bound<f64>, high: Bound<f64> },
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// Some of these words, each once, with commas between them.
    ListOf(&'static [&'static str]),
    /// A positive even integer.
    Even,
    /// An integer that divides the value of another key.
    DivisorOf { key: &'static str, value: u64 },
    /// An integer that is a multiple of the value of another key.
    MultipleOf { key: &'static str, value: u64 },
    /// An integer no greater than the value of another key.
    AtMost { key: &'static str, value: u64 },
    /// The same number as another key gives.
    EqualTo { key: &'static str, value: f64 },
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Expected::Text => f.write_str("text that is not empty"),
            Expected::Name => f.write_str(
                "a name of letters, digits, `-`, `_` and `.` that does not start with `.`",
            ),
            Expected::Flag => f.write_str("true or false"),
            Expected::Section => f.write_str("a section"),
            Expected::Integer { min, max } if *max == i64::MAX => {
                write!(f, "an integer of at least {min}")
            }
            Expected::Integer { min, max } => write!(f, "an integer from {min} to {max}"),
            Expected::Number { low, high } => fmt_number(f, low, high),
            Expected::OneOf(words) => match words {
                [word] => write!(f, "\"{word}\""),
                words => write!(f, "one of \"{}\"", words.join("\", \"")),
            },
            Expected::ListOf(words) => {
                write!(f, "some of {} with commas between them", words.join(", "))
            }
            Expected::Even => f.write_str("a positive even integer"),
            Expected::DivisorOf { key, value } => write!(f, "a divisor of {key} = {value}"),
            Expected::MultipleOf { key, value } => write!(f, "a multiple of {key} = {value}"),
            Expected::AtMost { key, value } => write!(f, "at most {key} = {value}"),
            Expected::EqualTo { key, value } => write!(f, "the value of {key} = {value}"),
        }
    }
}

/// Writes the bounds of a number as a reader would say them.
fn fmt_number(f: &mut fmt::Formatter<'_>, low: &Bound<f64>, high: &Bound<f64>) -> fmt::Result {
    f.write_str("a finite number")?;
    match low {
        Bound::Included(x) => write!(f, " of at least {x}")?,
        Bound::Excluded(x) => write!(f, " above {x}")?,
        Bound::Unbounded => {}
    }
    let joint = if matches!(low, Bound::Unbounded) {
        ""
    } else {
        " and"
    };
    match high {
        Bound::Included(x) => write!(f, "{joint} of at most {x}"),
        Bound::Excluded(x) => write!(f, "{joint} below {x}"),
        Bound::Unbounded => Ok(()),
    }
}

/// What stood in the file instead.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Found {
    /// An integer.
    Integer(i64),
    /// A number with a fraction, or one that is not finite.
    Number(f64),
    /// Text.
    Text(String),
    /// `true` or `false`.
    Flag(bool),
    /// `null`, which only JSON has.
    Null,
    /// A value of another kind: an array, a table, a date.
    Kind(&'static str),
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Found::Integer(x) => write!(f, "{x}"),
            Found::Number(x) => write!(f, "{x}"),
            Found::Text(x) => write!(f, "\"{x}\""),
            Found::Flag(x) => write!(f, "{x}"),
            Found::Null => f.write_str("null"),
            Found::Kind(kind) => f.write_str(kind),
        }
    }
}

impl From<&toml::Value> for Found {
    fn from(value: &toml::Value) -> Self {
        match value {
            toml::Value::Integer(x) => Found::Integer(*x),
            toml::Value::Float(x) => Found::Number(*x),
            toml::Value::String(x) => Found::Text(x.clone()),
            toml::Value::Boolean(x) => Found::Flag(*x),
            toml::Value::Datetime(_) => Found::Kind("a date"),
            toml::Value::Array(_) => Found::Kind("an array"),
            toml::Value::Table(_) => Found::Kind("a section"),
        }
    }
}

impl From<&serde_json::Value> for Found {
    fn from(value: &serde_json::Value) -> Self {
        use serde_json::Value;
        match value {
            Value::Null => Found::Null,
            Value::Bool(x) => Found::Flag(*x),
            Value::String(x) => Found::Text(x.clone()),
            Value::Number(n) => match n.as_i64() {
                Some(x) => Found::Integer(x),
                None => Found::Number(n.as_f64().unwrap_or(f64::NAN)),
            },
            Value::Array(_) => Found::Kind("an array"),
            Value::Object(_) => Found::Kind("an object"),
        }
    }
}

/// A recipe or a model configuration that cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The operating system refused to read a file.
    #[error("cannot read {path}: {source}")]
    Read {
        path: String,
        #[source]
        source: std::io::Error,
    },
    /// The text is not TOML or not JSON; line and column count from 1.
    #[error("{file}:{line}:{column}: {message}")]
    Syntax {
        file: String,
        line: usize,
        column: usize,
        message: String,
    },
    /// A key or a section that does not exist.
    #[error("{file}: unknown key `{key}`; the nearest known one is `{nearest}`")]
    UnknownKey {
        file: String,
        key: String,
        nearest: &'static str,
    },
    /// A key without a default is not there.
    #[error("{file}: missing key `{key}`: expected {expected}")]
    MissingKey {
        file: String,
        key: &'static str,
        expected: Expected,
    },
    /// `[model]` names neither a folder nor a family.
    #[error("{file}: [model] needs either `path` (a model folder) or `family`")]
    NoModel { file: String },
    /// A value of the wrong kind or outside its range.
    #[error("{file}: `{key}`: expected {expected}, found {found}")]
    Value {
        file: String,
        key: &'static str,
        expected: Expected,
        found: Found,
    },
    /// A key that has no meaning beside another one.
    #[error("{file}: `{key}` has no meaning beside {beside}")]
    Conflict {
        file: String,
        key: &'static str,
        beside: &'static str,
    },
    /// A value that is well known but that this version does not offer.
    #[error("{file}: `{key}` = {found} is not offered: this version offers {offered}")]
    Unsupported {
        file: String,
        key: &'static str,
        found: Found,
        offered: &'static str,
    },
    /// An override that is not `key=value`.
    #[error("cannot read the override `{text}`: expected key=value")]
    Override { text: String },
    /// A recipe changed in memory holds a value that TOML cannot hold.
    #[error("{file}: cannot be written as TOML: {message}")]
    Unwritable { file: String, message: String },
}

impl ConfigError {
    /// The exit code of the command line for this error.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::Usage
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_read_as_sentences() {
        let text = |low, high| Expected::Number { low, high }.to_string();
        assert_eq!(
            text(Bound::Included(0.0), Bound::Excluded(1.0)),
            "a finite number of at least 0 and below 1"
        );
        assert_eq!(
            text(Bound::Excluded(0.0), Bound::Unbounded),
            "a finite number above 0"
        );
        assert_eq!(
            text(Bound::Unbounded, Bound::Included(0.5)),
            "a finite number of at most 0.5"
        );
        assert_eq!(text(Bound::Unbounded, Bound::Unbounded), "a finite number");
    }

    #[test]
    fn a_configuration_error_is_a_usage_error() {
        let error = ConfigError::Override {
            text: "lr".to_string(),
        };
        assert_eq!(error.exit_code().code(), 2);
    }
}
