//! The text form of a golden.
//!
//! ```text
//! schema 1
//! contract 1
//! domain f32
//! recipe <blake3 of the canonical recipe>
//! manifest <blake3 of the manifest's text>
//! because <why these bits are right>
//! covers <what is compared>
//! excludes <what is not, and why>
//! step <n> loss <bits> <value> norm <bits> <value> root <blake3>
//! tensor <name> <blake3>
//! op <step> <call> <stem> <tensor> <blake3>
//! ```

use std::fmt::Write as _;
use std::path::Path;

use crate::engine::StepReport;
use crate::error::GoldenError;
use crate::num;
use crate::op::step_values::canonical_bits;

/// The version of the text form.
pub const SCHEMA: u32 = 1;

/// What every golden compares.
pub const COVERS: [&str; 3] = [
    "every step: the bits of loss and gradient norm, and the root over all parameters",
    "the last step: every parameter and both its moments",
    "the traced steps: every output of every op",
];

/// What no golden compares, and why.
pub const EXCLUDES: [&str; 3] = [
    "activations of the other steps: they show in the parameters",
    "kernels, threads and libraries: they deliver the bits and do not define them",
    "time and memory: they are not results",
];

/// One step of a golden.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepLine {
    pub step: u64,
    pub loss: u32,
    pub grad_norm: u32,
    pub root: blake3::Hash,
}

impl StepLine {
    /// The line of a step that has run, with the root after it.
    pub fn of(report: &StepReport, root: blake3::Hash) -> Self {
        StepLine {
            step: report.step,
            loss: canonical_bits(report.loss),
            grad_norm: canonical_bits(report.grad_norm),
            root,
        }
    }
}

/// One tensor after the last step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorLine {
    pub name: String,
    pub digest: blake3::Hash,
}

/// One output of one traced op.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpLine {
    pub step: u64,
    pub call: usize,
    pub stem: String,
    pub tensor: String,
    pub digest: blake3::Hash,
}

/// A golden.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GoldenFile {
    pub contract: u32,
    pub domain: String,
    pub recipe: String,
    pub manifest: String,
    pub because: String,
    pub covers: Vec<String>,
    pub excludes: Vec<String>,
    pub steps: Vec<StepLine>,
    pub tensors: Vec<TensorLine>,
    pub ops: Vec<OpLine>,
}

impl GoldenFile {
    /// A golden without lines, of this build's contract.
    pub fn empty(domain: &str, recipe: String, manifest: String) -> Self {
        GoldenFile {
            contract: num::VERSION,
            domain: domain.to_owned(),
            recipe,
            manifest,
            because: String::new(),
            covers: COVERS.map(str::to_owned).into(),
            excludes: EXCLUDES.map(str::to_owned).into(),
            steps: Vec::new(),
            tensors: Vec::new(),
            ops: Vec::new(),
        }
    }

    /// Reads a golden.
    ///
    /// # Errors
    /// A file that cannot be read, a line that does not parse, a golden without a step.
    pub fn read(path: &Path) -> Result<Self, GoldenError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|source| GoldenError::File {
            action: "read",
            path: name.clone(),
            source,
        })?;
        Self::parse(&text, &name)
    }

    /// Writes a golden: beside the place, then renamed over it.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), GoldenError> {
        crate::io::atomic::write_whole(path, self.to_text().as_bytes()).map_err(|source| {
            GoldenError::File {
                action: "write",
                path: path.display().to_string(),
                source,
            }
        })
    }

    /// The text form.
    pub fn to_text(&self) -> String {
        let mut t = String::new();
        let _ = writeln!(t, "schema {SCHEMA}");
        let _ = writeln!(t, "contract {}", self.contract);
        let _ = writeln!(t, "domain {}", self.domain);
        let _ = writeln!(t, "recipe {}", self.recipe);
        let _ = writeln!(t, "manifest {}", self.manifest);
        let _ = writeln!(t, "because {}", self.because);
        for line in &self.covers {
            let _ = writeln!(t, "covers {line}");
        }
        for line in &self.excludes {
            let _ = writeln!(t, "excludes {line}");
        }
        for s in &self.steps {
            let (loss, norm) = (f32::from_bits(s.loss), f32::from_bits(s.grad_norm));
            let _ = writeln!(
                t,
                "step {} loss {:08x} {loss} norm {:08x} {norm} root {}",
                s.step, s.loss, s.grad_norm, s.root
            );
        }
        for line in &self.tensors {
            let _ = writeln!(t, "tensor {} {}", line.name, line.digest);
        }
        for o in &self.ops {
            let _ = writeln!(
                t,
                "op {} {} {} {} {}",
                o.step, o.call, o.stem, o.tensor, o.digest
            );
        }
        t
    }

    /// Parses the text form; `path` names the file in errors.
    ///
    /// # Errors
    /// The first line that is not what the format asks for.
    pub fn parse(text: &str, path: &str) -> Result<Self, GoldenError> {
        let mut lines = Lines {
            path,
            lines: text.lines().enumerate().peekable(),
        };
        let schema: u32 = lines.field("schema", "`schema N`")?;
        if schema != SCHEMA {
            return Err(GoldenError::Schema {
                path: path.to_owned(),
                expected: SCHEMA,
                found: schema,
            });
        }
        let mut golden = GoldenFile::empty("", String::new(), String::new());
        golden.contract = lines.field("contract", "`contract N`")?;
        golden.domain = lines.field("domain", "`domain NAME`")?;
        golden.recipe = lines.hash_field("recipe", "`recipe <64 hex digits>`")?;
        golden.manifest = lines.hash_field("manifest", "`manifest <64 hex digits>`")?;
        golden.because = lines.text("because", "`because TEXT`")?;
        golden.covers = lines.all("covers");
        golden.excludes = lines.all("excludes");
        golden.lines(&mut lines)?;
        match golden.steps.is_empty() {
            true => Err(GoldenError::Empty {
                path: path.to_owned(),
            }),
            false => Ok(golden),
        }
    }

    fn lines(&mut self, lines: &mut Lines) -> Result<(), GoldenError> {
        for (number, line) in lines.lines.by_ref() {
            let words: Vec<&str> = line.split(' ').collect();
            let known = match words.first() {
                Some(&"step") => step_line(&words).map(|l| self.steps.push(l)),
                Some(&"tensor") => tensor_line(&words).map(|l| self.tensors.push(l)),
                Some(&"op") => op_line(&words).map(|l| self.ops.push(l)),
                _ => None,
            };
            let in_order = self
                .steps
                .last()
                .is_none_or(|s| s.step as usize == self.steps.len() - 1);
            if known.is_none() || !in_order {
                return Err(GoldenError::Line {
                    path: lines.path.to_owned(),
                    line: number + 1,
                    expected: "a `step` (in order from 0), `tensor` or `op` line",
                    found: line.to_owned(),
                });
            }
        }
        Ok(())
    }
}

fn step_line(words: &[&str]) -> Option<StepLine> {
    let &[_, step, "loss", loss, _, "norm", norm, _, "root", root] = words else {
        return None;
    };
    Some(StepLine {
        step: step.parse().ok()?,
        loss: bits(loss)?,
        grad_norm: bits(norm)?,
        root: blake3::Hash::from_hex(root).ok()?,
    })
}

fn tensor_line(words: &[&str]) -> Option<TensorLine> {
    let &[_, name, digest] = words else {
        return None;
    };
    Some(TensorLine {
        name: name.to_owned(),
        digest: blake3::Hash::from_hex(digest).ok()?,
    })
}

fn op_line(words: &[&str]) -> Option<OpLine> {
    let &[_, step, call, stem, tensor, digest] = words else {
        return None;
    };
    Some(OpLine {
        step: step.parse().ok()?,
        call: call.parse().ok()?,
        stem: stem.to_owned(),
        tensor: tensor.to_owned(),
        digest: blake3::Hash::from_hex(digest).ok()?,
    })
}

fn bits(word: &str) -> Option<u32> {
    (word.len() == 8).then(|| u32::from_str_radix(word, 16).ok())?
}

struct Lines<'a> {
    path: &'a str,
    lines: std::iter::Peekable<std::iter::Enumerate<std::str::Lines<'a>>>,
}

impl Lines<'_> {
    fn text(&mut self, key: &str, expected: &'static str) -> Result<String, GoldenError> {
        let Some((number, line)) = self.lines.next() else {
            return Err(GoldenError::Truncated {
                path: self.path.to_owned(),
                expected,
            });
        };
        match line
            .strip_prefix(key)
            .and_then(|rest| rest.strip_prefix(' '))
        {
            Some(value) => Ok(value.to_owned()),
            None => Err(self.wrong(number, expected, line)),
        }
    }

    fn field<T: std::str::FromStr>(
        &mut self,
        key: &str,
        expected: &'static str,
    ) -> Result<T, GoldenError> {
        let number = self.lines.peek().map_or(0, |(n, _)| *n);
        let value = self.text(key, expected)?;
        value
            .parse()
            .map_err(|_| self.wrong(number, expected, &value))
    }

    fn hash_field(&mut self, key: &str, expected: &'static str) -> Result<String, GoldenError> {
        let number = self.lines.peek().map_or(0, |(n, _)| *n);
        let value = self.text(key, expected)?;
        match blake3::Hash::from_hex(&value) {
            Ok(_) => Ok(value),
            Err(_) => Err(self.wrong(number, expected, &value)),
        }
    }

    fn all(&mut self, key: &str) -> Vec<String> {
        let mut found = Vec::new();
        while let Some((_, line)) = self.lines.peek()
            && let Some(value) = line
                .strip_prefix(key)
                .and_then(|rest| rest.strip_prefix(' '))
        {
            found.push(value.to_owned());
            self.lines.next();
        }
        found
    }

    fn wrong(&self, number: usize, expected: &'static str, found: &str) -> GoldenError {
        GoldenError::Line {
            path: self.path.to_owned(),
            line: number + 1,
            expected,
            found: found.to_owned(),
        }
    }
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
