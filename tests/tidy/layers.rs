//! A module imports only from its own layer and those below it.

use super::source::{Fault, File, words};

/// The layer of every top-level module.
const LAYERS: [(&str, u8); 26] = [
    ("docs", 0),
    ("error", 0),
    ("shape", 0),
    ("num", 0),
    ("op", 1),
    ("program", 1),
    ("plan", 1),
    ("layout", 1),
    ("dependencies", 1),
    ("manifest", 1),
    ("grad", 1),
    ("model", 1),
    ("data", 1),
    ("io", 1),
    ("backend", 2),
    ("cpu", 3),
    ("cuda", 3),
    ("any_device", 4),
    ("engine", 4),
    ("golden", 5),
    ("report", 5),
    ("parity", 5),
    ("cli", 6),
    ("main", 6),
    ("python", 6),
    ("bench", 6),
];

/// Modules of one layer that may not know each other.
const APART: [(&str, &str); 2] = [("cpu", "cuda"), ("cuda", "cpu")];

fn layer(module: &str) -> Option<u8> {
    let found = LAYERS.iter().find(|(name, _)| *name == module);
    found.map(|(_, layer)| *layer)
}

/// Imports from a layer above, or from a module that has to stay apart.
pub fn check(file: &File) -> Vec<Fault> {
    let Some(inside) = file.path.strip_prefix("src/") else {
        return Vec::new();
    };
    // The root of the crate only declares its modules.
    if !file.is_rust() || file.path == "src/lib.rs" {
        return Vec::new();
    }
    let module = inside.split('/').next().unwrap_or(inside);
    let module = module.strip_suffix(".rs").unwrap_or(module);
    let Some(own) = layer(module) else {
        return vec![file.fault(0, format!("module `{module}` has no layer"))];
    };
    let mut faults = Vec::new();
    for (offset, found) in imports(file, inside) {
        let what = match layer(found) {
            None => continue,
            Some(above) if above > own => {
                format!("`{module}` (layer {own}) imports `{found}` (layer {above})")
            }
            Some(_) if APART.contains(&(module, found)) => {
                format!("`{module}` imports `{found}`, which it has to stay apart from")
            }
            Some(_) => continue,
        };
        faults.push(file.fault(offset, what));
    }
    faults
}

/// The top-level modules that a file names, with their offsets.
fn imports<'a>(file: &'a File, inside: &str) -> Vec<(usize, &'a str)> {
    // What lies above a file decides how many times `super` leads to the root of the crate.
    let depth = inside.matches('/').count();
    let to_root = match inside.ends_with("mod.rs") {
        true => depth,
        false => depth + 1,
    };
    let supers = "super::".repeat(to_root);
    let roots = ["crate::", "bitstep::", supers.as_str()];
    let mut found = Vec::new();
    for root in roots {
        for (start, _) in file.code.match_indices(root) {
            let before = file.code[..start].chars().next_back();
            let whole = before.is_none_or(|c| !(c.is_alphanumeric() || c == '_' || c == ':'));
            if whole {
                found.extend(named(&file.code, start + root.len()));
            }
        }
    }
    found
}

/// The names at `at`: one, or the first ones of a braced list.
fn named(code: &str, at: usize) -> Vec<(usize, &str)> {
    if !code[at..].starts_with('{') {
        return words(&code[at..])
            .take(1)
            .map(|(i, w)| (at + i, w))
            .collect();
    }
    let (mut depth, mut fresh, mut found) = (0, true, Vec::new());
    for (i, c) in code[at..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 1 => fresh = true,
            c if depth == 1 && fresh && c.is_alphabetic() => {
                found.extend(words(&code[at + i..]).take(1).map(|(j, w)| (at + i + j, w)));
                fresh = false;
            }
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    found
}
