//! The programs of a plan: what is captured and proven as a graph of its own.

use std::fmt;

use crate::op::OpCall;

/// The programs over one layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ProgramKind {
    /// Forward, backward, clip and AdamW.
    Step,
    /// Forward and loss; changes nothing that survives.
    Evaluate,
    /// Forward and backward of one pass; leaves its gradient and its sum of losses.
    Accumulate,
    /// Forward up to what the caller computes a loss from.
    Forward,
    /// Turns what forward has left into its gradient: the cross-entropy of weighted targets.
    Score,
    /// Backward from the gradient of what forward has left.
    Backward,
    /// Adds the partial sum of a level to the gradient of the last pass.
    Merge(u8),
    /// Keeps the gradient of the last pass, with what was merged into it, as the partial sum of a level.
    Keep(u8),
    /// Clip and AdamW over the accumulated gradient.
    Apply,
}

impl fmt::Display for ProgramKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProgramKind::Step => f.write_str("step"),
            ProgramKind::Evaluate => f.write_str("evaluate"),
            ProgramKind::Accumulate => f.write_str("accumulate"),
            ProgramKind::Forward => f.write_str("forward"),
            ProgramKind::Score => f.write_str("score"),
            ProgramKind::Backward => f.write_str("backward"),
            ProgramKind::Merge(level) => write!(f, "merge {level}"),
            ProgramKind::Keep(level) => write!(f, "keep {level}"),
            ProgramKind::Apply => f.write_str("apply"),
        }
    }
}

/// The programs of a plan in the order in which they are captured.
#[derive(Clone, Debug, Default)]
pub struct Programs(Vec<(ProgramKind, Vec<OpCall>)>);

impl Programs {
    pub(super) fn add(&mut self, kind: ProgramKind, calls: Vec<OpCall>) {
        self.0.push((kind, calls));
    }

    /// The calls of a program; none where the plan has no such program.
    pub fn calls(&self, kind: ProgramKind) -> &[OpCall] {
        let found = self.0.iter().find(|(k, _)| *k == kind);
        found.map_or(&[], |(_, calls)| calls)
    }

    /// Every program.
    pub fn iter(&self) -> impl Iterator<Item = (ProgramKind, &[OpCall])> {
        self.0.iter().map(|(kind, calls)| (*kind, calls.as_slice()))
    }
}
