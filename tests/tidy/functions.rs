//! Functions of a file: where they stand, how long they are, what they take.

use super::source::{File, words};

/// One `fn` of a file.
pub struct Function {
    pub name: String,
    pub offset: usize,
    /// Whether `pub` stands before it, in any form.
    pub public: bool,
    /// The text of every parameter but `self`.
    pub parameters: Vec<String>,
    /// Lines from `fn` to the closing brace; 1 for a function without a body.
    pub lines: usize,
}

/// Every function of a file, from its code.
pub fn functions(file: &File) -> Vec<Function> {
    let code = file.code.as_str();
    let keywords = file.words().filter(|(_, word)| *word == "fn");
    keywords
        .filter_map(|(offset, _)| function(code, offset))
        .collect()
}

fn function(code: &str, offset: usize) -> Option<Function> {
    let after = offset + 2;
    let (name_at, name) = words(&code[after..]).next()?;
    // `fn(A) -> B` is a type and has no name.
    if !code[after..after + name_at].trim().is_empty() {
        return None;
    }
    let mut at = after + name_at + name.len();
    if code[at..].starts_with('<') {
        at += angle_end(&code[at..])?;
    }
    let open = at + code[at..].find('(')?;
    let close = open + bracket_end(&code[open..])?;
    let parameters = split_top_level(&code[open + 1..close - 1]);
    let body = code[close..].find(['{', ';'])? + close;
    let end = match code.as_bytes()[body] {
        b'{' => body + bracket_end(&code[body..])?,
        _ => body,
    };
    let line_start = code[..offset].rfind('\n').map_or(0, |i| i + 1);
    let head = &code[line_start..offset];
    Some(Function {
        name: name.to_owned(),
        offset,
        public: words(head).any(|(_, w)| w == "pub"),
        parameters: parameters
            .into_iter()
            .filter(|p| !words(p).any(|(_, w)| w == "self"))
            .collect(),
        lines: code[offset..end].matches('\n').count() + 1,
    })
}

/// The length of the bracketed text that `code` starts with.
fn bracket_end(code: &str) -> Option<usize> {
    let mut depth = 0usize;
    for (i, c) in code.char_indices() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(i + 1);
        }
    }
    None
}

/// The length of the generics that `code` starts with; the `>` of an arrow does not count.
fn angle_end(code: &str) -> Option<usize> {
    let mut depth = 0usize;
    let bytes = code.as_bytes();
    for (i, &b) in bytes.iter().enumerate() {
        match b {
            b'<' => depth += 1,
            b'>' if bytes[i - 1] != b'-' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(i + 1);
        }
    }
    None
}

/// The parts between commas that stand in no bracket.
fn split_top_level(text: &str) -> Vec<String> {
    let (mut depth, mut parts, mut part) = (0i32, Vec::new(), String::new());
    let mut before = ' ';
    for c in text.chars() {
        match c {
            '(' | '[' | '{' | '<' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            '>' if before != '-' => depth -= 1,
            _ => {}
        }
        before = c;
        match c {
            ',' if depth == 0 => parts.push(std::mem::take(&mut part)),
            _ => part.push(c),
        }
    }
    parts.push(part);
    parts.retain(|p| !p.trim().is_empty());
    parts
}
