//! The comparison of a golden with what a run gave.

use std::fmt;

use super::file::{GoldenFile, OpLine};

/// The outcome of a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Identical,
    Differs(Box<FirstDifference>),
}

/// The first place where two sides differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirstDifference {
    /// The step, where the difference belongs to one.
    pub step: Option<u64>,
    /// What differs: a header field, a step's loss, norm or root, a tensor, an op's output.
    pub what: String,
    /// The op whose output differs first.
    pub op: Option<OpPlace>,
    /// The tensor that differs first.
    pub tensor: Option<String>,
    /// The first element that differs.
    pub element: Option<Element>,
    pub expected: String,
    pub found: String,
    /// What was done to find the place, and what could not be found.
    pub note: String,
}

/// A call of the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpPlace {
    pub call: usize,
    pub stem: String,
    /// The kernel or routine that served it, where known.
    pub kernel: String,
}

/// One element with both its values, as bits of its type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Element {
    pub index: usize,
    pub expected: u32,
    pub found: u32,
}

impl FirstDifference {
    fn new(step: Option<u64>, what: impl Into<String>, sides: (String, String)) -> Box<Self> {
        Box::new(FirstDifference {
            step,
            what: what.into(),
            op: None,
            tensor: None,
            element: None,
            expected: sides.0,
            found: sides.1,
            note: String::new(),
        })
    }
}

impl fmt::Display for FirstDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "differs")?;
        if let Some(step) = self.step {
            write!(f, " at step {step}")?;
        }
        writeln!(f, ": {}", self.what)?;
        writeln!(f, "  expected {}", self.expected)?;
        writeln!(f, "  found    {}", self.found)?;
        if let Some(tensor) = &self.tensor {
            writeln!(f, "  tensor   {tensor}")?;
        }
        if let Some(op) = &self.op {
            writeln!(
                f,
                "  op       {} (call {}, kernel {})",
                op.stem, op.call, op.kernel
            )?;
        }
        if let Some(e) = &self.element {
            let (a, b) = (f32::from_bits(e.expected), f32::from_bits(e.found));
            writeln!(
                f,
                "  index    {}: expected {:08x} ({a:e}), found {:08x} ({b:e})",
                e.index, e.expected, e.found
            )?;
        }
        if !self.note.is_empty() {
            writeln!(f, "  note     {}", self.note)?;
        }
        Ok(())
    }
}

/// Compares what a run gave with a golden, in the order in which a difference would arise: header,
/// then for each step the trace, loss, norm and root, then the last step's tensors.
pub fn compare(golden: &GoldenFile, run: &GoldenFile) -> Verdict {
    let difference = header(golden, run)
        .or_else(|| steps(golden, run))
        .or_else(|| tensors(golden, run))
        .or_else(|| ops(golden, run, None));
    difference.map_or(Verdict::Identical, Verdict::Differs)
}

fn header(golden: &GoldenFile, run: &GoldenFile) -> Option<Box<FirstDifference>> {
    let fields = [
        (
            "contract version",
            golden.contract.to_string(),
            run.contract.to_string(),
        ),
        ("domain", golden.domain.clone(), run.domain.clone()),
        ("recipe hash", golden.recipe.clone(), run.recipe.clone()),
        (
            "manifest hash",
            golden.manifest.clone(),
            run.manifest.clone(),
        ),
    ];
    let (what, expected, found) = fields.into_iter().find(|(_, a, b)| a != b)?;
    Some(FirstDifference::new(None, what, (expected, found)))
}

fn steps(golden: &GoldenFile, run: &GoldenFile) -> Option<Box<FirstDifference>> {
    for (expected, found) in golden.steps.iter().zip(&run.steps) {
        let step = Some(expected.step);
        if let Some(difference) = ops(golden, run, step) {
            return Some(difference);
        }
        let float = |bits: u32| format!("{bits:08x} ({:e})", f32::from_bits(bits));
        let fields = [
            ("loss", float(expected.loss), float(found.loss)),
            (
                "gradient norm",
                float(expected.grad_norm),
                float(found.grad_norm),
            ),
            (
                "root over parameters",
                expected.root.to_string(),
                found.root.to_string(),
            ),
        ];
        if let Some((what, a, b)) = fields.into_iter().find(|(_, a, b)| a != b) {
            return Some(FirstDifference::new(step, what, (a, b)));
        }
    }
    let (a, b) = (golden.steps.len(), run.steps.len());
    (a != b).then(|| {
        let what = "number of steps";
        FirstDifference::new(None, what, (a.to_string(), b.to_string()))
    })
}

fn tensors(golden: &GoldenFile, run: &GoldenFile) -> Option<Box<FirstDifference>> {
    let last = golden.steps.last().map(|s| s.step);
    let longest = golden.tensors.len().max(run.tensors.len());
    let index = (0..longest).find(|&i| golden.tensors.get(i) != run.tensors.get(i))?;
    let (a, b) = (golden.tensors.get(index), run.tensors.get(index));
    let text = |line: Option<&super::file::TensorLine>| {
        line.map_or("no tensor".into(), |t| format!("{} {}", t.name, t.digest))
    };
    let mut difference =
        FirstDifference::new(last, "tensor after the last step", (text(a), text(b)));
    difference.tensor = a.or(b).map(|t| t.name.clone());
    Some(difference)
}

/// The first op line that differs, of one step or of all.
fn ops(golden: &GoldenFile, run: &GoldenFile, step: Option<u64>) -> Option<Box<FirstDifference>> {
    let of = |file: &GoldenFile| -> Vec<OpLine> {
        let wanted = |o: &&OpLine| step.is_none_or(|s| s == o.step);
        file.ops.iter().filter(wanted).cloned().collect()
    };
    let (golden, run) = (of(golden), of(run));
    let longest = golden.len().max(run.len());
    let index = (0..longest).find(|&i| golden.get(i) != run.get(i))?;
    let (a, b) = (golden.get(index), run.get(index));
    let text = |o: Option<&OpLine>| o.map_or("no output".into(), |o| o.digest.to_string());
    let line = a.or(b)?;
    let what = "output of an op";
    let mut difference = FirstDifference::new(Some(line.step), what, (text(a), text(b)));
    difference.tensor = Some(line.tensor.clone());
    difference.op = Some(OpPlace {
        call: line.call,
        stem: line.stem.clone(),
        kernel: String::from("unknown"),
    });
    Some(difference)
}
