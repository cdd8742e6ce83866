//! The source tree as text, and each file's code with comments and literals blanked out.

use std::fmt;
use std::path::{Path, PathBuf};

/// What a rule found.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    pub path: String,
    /// From 1.
    pub line: usize,
    pub what: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.what)
    }
}

/// One text file of the repository.
pub struct File {
    /// Relative to the repository, with `/`.
    pub path: String,
    pub text: String,
    /// The text of the same length and the same lines, with comments, strings and characters as spaces.
    pub code: String,
}

impl File {
    pub fn new(path: impl Into<String>, text: impl Into<String>) -> Self {
        let (path, text) = (path.into(), text.into());
        let code = match path.ends_with(".rs") {
            true => blank(&text),
            false => text.clone(),
        };
        File { path, text, code }
    }

    pub fn fault(&self, offset: usize, what: impl Into<String>) -> Fault {
        Fault {
            path: self.path.clone(),
            line: self.text[..offset].matches('\n').count() + 1,
            what: what.into(),
        }
    }

    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// Whether the whole file is test code.
    pub fn is_test(&self) -> bool {
        self.path.starts_with("tests/") || self.path.ends_with("_tests.rs")
    }

    /// The offset from which the file is its own `#[cfg(test)]` module; the end when it has none.
    pub fn tests_start(&self) -> usize {
        let cut = self.code.find("#[cfg(test)]\nmod ");
        cut.unwrap_or(self.code.len())
    }

    /// Words of the code with their offsets.
    pub fn words(&self) -> impl Iterator<Item = (usize, &str)> {
        words(&self.code)
    }
}

/// Identifiers and keywords with their offsets.
pub fn words(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let bytes = code.as_bytes();
        while at < bytes.len() && !is_word(bytes[at]) {
            at += 1;
        }
        let start = at;
        while at < bytes.len() && is_word(bytes[at]) {
            at += 1;
        }
        (start < at).then(|| (start, &code[start..at]))
    })
}

fn is_word(byte: u8) -> bool {
    byte == b'_' || byte.is_ascii_alphanumeric()
}

/// Blanks comments, strings and characters, byte for byte, keeping every line end.
fn blank(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = literal_end(bytes, at);
        for byte in &mut code[at..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at = end.max(at + 1);
    }
    // Only whole literals and comments are blanked, so what is left is still UTF-8.
    String::from_utf8(code).expect("blanking keeps the text UTF-8")
}

/// The end of the comment, string or character that starts at `at`; `at` itself for code.
fn literal_end(bytes: &[u8], at: usize) -> usize {
    let rest = &bytes[at..];
    let find = |needle: &[u8], from: usize| {
        let found = rest[from..].windows(needle.len()).position(|w| w == needle);
        found.map_or(bytes.len(), |i| at + from + i)
    };
    let inside_word = at > 0 && is_word(bytes[at - 1]);
    match rest {
        [b'/', b'/', ..] => find(b"\n", 0),
        [b'/', b'*', ..] => (find(b"*/", 2) + 2).min(bytes.len()),
        [b'r', b'"', ..] if !inside_word => find(b"\"", 2) + 1,
        [b'r', b'#', b'"', ..] if !inside_word => find(b"\"#", 3) + 2,
        [b'"', ..] => quoted_end(bytes, at, b'"'),
        // A lifetime has no second quote where a character has one.
        [b'\'', b'\\', ..] => quoted_end(bytes, at, b'\''),
        [b'\'', first, ..] => {
            let width = match first {
                0..0x80 => 1,
                0xc0..0xe0 => 2,
                0xe0..0xf0 => 3,
                _ => 4,
            };
            match rest.get(1 + width) {
                Some(b'\'') => at + width + 2,
                _ => at,
            }
        }
        _ => at,
    }
}

fn quoted_end(bytes: &[u8], start: usize, quote: u8) -> usize {
    let mut at = start + 1;
    while at < bytes.len() && bytes[at] != quote {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(bytes.len())
}

/// Every text file that belongs to the repository.
pub fn tree() -> Vec<File> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    walk(root, root, &mut files);
    files.sort_by(|a, b| a.path.cmp(&b.path));
    assert!(
        files.iter().any(|f| f.path == "src/lib.rs"),
        "the source tree must be found"
    );
    files
}

/// What holds no source: build outputs, runs, version control.
const SKIPPED: [&str; 5] = ["target", "out", "wip", ".git", "__pycache__"];

fn walk(root: &Path, folder: &Path, files: &mut Vec<File>) {
    let entries = std::fs::read_dir(folder).expect("a readable folder");
    let mut paths: Vec<PathBuf> = entries.map(|e| e.expect("an entry").path()).collect();
    paths.sort();
    for path in paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if SKIPPED.contains(&name.as_ref()) {
            continue;
        }
        if path.is_dir() {
            walk(root, &path, files);
        } else if let Ok(text) = std::fs::read_to_string(&path) {
            let relative = path.strip_prefix(root).expect("below the root");
            files.push(File::new(relative.to_string_lossy(), text));
        }
    }
}
