//! Errors of planning a step: operands that do not fit an op, overlapping writes, shapes out of range.

use thiserror::Error;

/// A program that cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// An op was given a number of operands it does not take.
    #[error("call {call} ({op}): expected {expected} {side} operands, found {found}")]
    OperandCount {
        call: usize,
        op: &'static str,
        side: &'static str,
        expected: usize,
        found: usize,
    },
    /// An operand has the wrong number of elements or the wrong element type.
    #[error(
        "call {call} ({op}): operand {operand} is tensor {tensor}: expected {expected}, found {found}"
    )]
    Operand {
        call: usize,
        op: &'static str,
        operand: &'static str,
        tensor: String,
        expected: String,
        found: String,
    },
    /// A call writes bytes that another of its operands covers, without declaring it.
    #[error(
        "call {call} ({op}): writes {written}, which overlaps its operand {other}; in-place use must be declared by the op"
    )]
    Overlap {
        call: usize,
        op: &'static str,
        written: String,
        other: String,
    },
    /// A call reads a tensor that nothing has written.
    #[error("call {call} ({op}): reads {tensor} before anything writes it")]
    ReadBeforeWrite {
        call: usize,
        op: &'static str,
        tensor: String,
    },
    /// A view reaches beyond its parent.
    #[error("view {view} covers elements {start}..{end} of {parent}, which has {elements}")]
    ViewOutOfBounds {
        view: String,
        parent: String,
        start: usize,
        end: usize,
        elements: usize,
    },
    /// An op without a derivative stands where a gradient is needed.
    #[error("op {op} has no backward, but a gradient of {tensor} is needed")]
    NoBackward { op: &'static str, tensor: String },
    /// A gradient is needed that no later call produced.
    #[error("op {op}: the gradient of {tensor} was never produced")]
    MissingGradient { op: &'static str, tensor: String },
    /// A second contribution to a gradient that its op can only assign.
    #[error("op {op}: the gradient of {tensor} already exists and this op can only assign it")]
    SecondGradient { op: &'static str, tensor: String },
    /// A trainable parameter is not reached by backward.
    #[error("parameter {parameter} gets no gradient: no call of the program reads it")]
    NoGradient { parameter: String },
    /// Two parameters share a name.
    #[error("parameter {parameter} is registered twice")]
    DuplicateParameter { parameter: String },
    /// A form of the step that the model or the batch does not allow.
    #[error("{form}: expected {expected}, found {found}")]
    Form {
        form: &'static str,
        expected: &'static str,
        found: String,
    },
    /// A call that would not give its bits again if backward computed it anew.
    #[error("op {op} cannot be computed again: for {tensor} expected {expected}")]
    Again {
        op: &'static str,
        tensor: String,
        expected: &'static str,
    },
    /// A budget below what the arena takes whatever is computed again.
    #[error(
        "memory.arena_bytes: expected at least {needed_bytes}, the arena with everything computed again, found {budget_bytes}"
    )]
    ArenaBudget {
        budget_bytes: usize,
        needed_bytes: usize,
    },
    /// A size is outside what an op supports.
    #[error("{what}: expected {expected}, found {found}")]
    Size {
        what: &'static str,
        expected: &'static str,
        found: usize,
    },
}
