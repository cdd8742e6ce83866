//! The head in row chunks: product, cross-entropy and their backward, one chunk of logits at a time.

use super::{ParamArenas, PlanConfig, StepInputs, StepOutputs, TokenCut};
use crate::error::PlanError;
use crate::grad::GradBuilder;
use crate::model::Head;
use crate::num::tree::{ROW_PIECE, TreeFold, weight_piece};
use crate::op::cross_entropy::{CrossEntropy, LogitsAfter, LossSum};
use crate::op::matmul::Matmul;
use crate::op::tree_add::TreeAdd;
use crate::op::{OpCall, Slot, Store};
use crate::program::ProgramBuilder;

/// One row chunk.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    start: usize,
    rows: usize,
    /// The grain the chunk is a part of, or its own number where it covers whole grains.
    grain: usize,
    hidden: Slot,
    targets: Slot,
    weights: Slot,
    row_loss: Slot,
    row_hit: Slot,
    logits: Slot,
}

/// The chunks of a head and what they need.
pub struct HeadPlan {
    head: Head,
    scalars: Slot,
    loss_scale: Option<Slot>,
    outputs: StepOutputs,
    cut: TokenCut,
    rows: usize,
    chunks: Vec<Chunk>,
}

impl HeadPlan {
    /// Declares the logits and the views of every chunk.
    pub fn declare(
        program: &mut ProgramBuilder,
        head: Head,
        (inputs, outputs): (&StepInputs, StepOutputs),
        config: &PlanConfig,
    ) -> Result<Self, PlanError> {
        let total = inputs.rows();
        let cut = config.cut();
        let grain = cut.grain.min(total);
        let most = (config.chunk_logits / head.vocab_size.max(1)).max(1);
        let rows = chunk_rows(&head, (most, cut.piece), grain).min(total);
        let buffer = program.narrow_activation("logits", [rows, head.vocab_size]);
        let span = grain.max(rows);
        let mut chunks = Vec::new();
        for (index, first) in (0..total).step_by(span).enumerate() {
            let end = (first + span).min(total);
            for start in (first..end).step_by(rows) {
                let count = rows.min(end - start);
                let mut view = |slot| rows_of(program, slot, total, (start, count));
                chunks.push(Chunk {
                    start,
                    rows: count,
                    grain: index,
                    hidden: view(head.hidden)?,
                    targets: view(inputs.targets)?,
                    weights: view(inputs.weights)?,
                    row_loss: view(outputs.row_loss)?,
                    row_hit: view(outputs.row_hit)?,
                    logits: rows_of(program, buffer, rows, (0, count))?,
                });
            }
        }
        Ok(HeadPlan {
            head,
            scalars: inputs.scalars,
            loss_scale: inputs.loss_scale,
            outputs,
            cut,
            rows: total,
            chunks,
        })
    }

    /// The logits slot of every chunk and the chunk's first row.
    pub fn logits(&self) -> Vec<(Slot, usize)> {
        self.chunks.iter().map(|c| (c.logits, c.start)).collect()
    }

    /// Appends forward and loss alone.
    pub fn evaluate(&self, program: &mut ProgramBuilder) {
        for chunk in &self.chunks {
            self.forward(program, chunk, LogitsAfter::Kept);
        }
        self.loss(program);
    }

    /// Appends the head with its backward, the backward of `body`, and the loss. Returns the
    /// parameters that got a gradient.
    pub fn step(
        &self,
        program: &mut ProgramBuilder,
        body: &[OpCall],
        arenas: ParamArenas,
    ) -> Result<Vec<Slot>, PlanError> {
        let mut grads = GradBuilder::new(program, self.cut, (arenas.param, arenas.grad));
        let mut levels = match grads.is_trainable(self.head.weight) {
            true => Some(Levels::over(self.head, &mut grads)?),
            false => None,
        };
        let mut grains: TreeFold<usize> = TreeFold::new();
        let mut pieces: TreeFold<usize> = TreeFold::new();
        for (index, chunk) in self.chunks.iter().enumerate() {
            let calls =
                grads.forward(|program| self.forward(program, chunk, LogitsAfter::Gradient));
            let Some(levels) = &mut levels else {
                grads.backward(&calls)?;
                grads.forget(chunk.logits);
                continue;
            };
            let next = self.chunks.get(index + 1);
            let last = next.is_none_or(|next| next.grain != chunk.grain);
            let left = match (last, pieces.is_empty()) {
                (false, _) => pieces.left_of_next(),
                (true, false) => pieces.left_of_last(),
                (true, true) if next.is_some() => grains.left_of_next(),
                (true, true) => grains.left_of_last(),
            };
            // The product adds a right side to its left side, where it then stands too.
            let (level, store) = match left {
                Some(&left) => (left, Store::Add),
                None => (levels.take(&mut grads), Store::Assign),
            };
            grads.redirect(self.head.weight, Some((levels.slots[level], store)));
            grads.backward(&calls)?;
            grads.forget(chunk.logits);
            grads.redirect(self.head.weight, None);
            pieces.push(level, |a, b| levels.merge(&mut grads, a, b));
            if last {
                let done = std::mem::take(&mut pieces);
                if let Some(level) = done.finish(|a, b| levels.merge(&mut grads, a, b)) {
                    grains.push(level, |a, b| levels.merge(&mut grads, a, b));
                }
            }
        }
        if let Some(levels) = &mut levels {
            grains.finish(|a, b| levels.merge(&mut grads, a, b));
            grads.mark_assigned(self.head.weight)?;
        }
        grads.backward(body)?;
        let reached = grads.reached().collect();
        self.loss(program);
        Ok(reached)
    }

    fn forward(&self, program: &mut ProgramBuilder, chunk: &Chunk, after: LogitsAfter) {
        let (rows, vocab_size) = (chunk.rows, self.head.vocab_size);
        let product = Matmul {
            rows,
            n_in: self.head.d_model,
            n_out: vocab_size,
            bias: false,
            math: program.math,
        };
        program.call(
            product,
            vec![chunk.hidden, self.head.weight],
            vec![chunk.logits],
        );
        let mut reads = vec![chunk.targets, chunk.weights, self.scalars];
        let mut writes = vec![chunk.row_loss, chunk.row_hit];
        match after {
            LogitsAfter::Gradient => {
                writes.push(chunk.logits);
                reads.extend(self.loss_scale);
            }
            LogitsAfter::Kept => reads.push(chunk.logits),
        }
        program.call(
            CrossEntropy {
                rows,
                vocab_size,
                after,
                math: program.math,
            },
            reads,
            writes,
        );
    }

    fn loss(&self, program: &mut ProgramBuilder) {
        let op = LossSum {
            sum: self.cut.sum(self.rows, Some(ROW_PIECE)),
        };
        let reads = vec![self.outputs.row_loss, self.scalars];
        program.call(op, reads, vec![self.outputs.loss]);
    }
}

/// The partial gradients of the head's weight while the tree over chunks is built. Level 0 is the
/// gradient itself; every merge keeps its left side, so the root ends there.
struct Levels {
    slots: Vec<Slot>,
    free: Vec<bool>,
    shape: [usize; 2],
}

impl Levels {
    fn over(head: Head, grads: &mut GradBuilder) -> Result<Self, PlanError> {
        Ok(Levels {
            slots: vec![grads.gradient_view(head.weight)?],
            free: vec![true],
            shape: [head.vocab_size, head.d_model],
        })
    }

    fn take(&mut self, grads: &mut GradBuilder) -> usize {
        let level = self.free.iter().position(|&free| free).unwrap_or_else(|| {
            let name = format!("head.partial.{}", self.slots.len());
            self.slots.push(grads.scratch(&name, self.shape));
            self.free.push(true);
            self.free.len() - 1
        });
        self.free[level] = false;
        level
    }

    /// Adds the right side to the left one, unless the product has done so.
    fn merge(&mut self, grads: &mut GradBuilder, left: usize, right: usize) -> usize {
        if left == right {
            return left;
        }
        let op = TreeAdd {
            elements: self.shape[0] * self.shape[1],
        };
        grads.emit(op, vec![self.slots[right]], vec![self.slots[left]]);
        self.free[right] = true;
        left
    }
}

/// Rows of a chunk: as many as are allowed in a form that keeps the tree over tokens: a power of two
/// of whole grains, or within a grain a piece times a power of two.
fn chunk_rows(head: &Head, (most, piece): (usize, Option<usize>), grain: usize) -> usize {
    if grain <= most {
        return grain * (1 << (most / grain).ilog2());
    }
    let wanted = piece.unwrap_or_else(|| weight_piece(grain, head.vocab_size * head.d_model));
    let piece = wanted.min(1 << most.ilog2());
    piece * (1 << (most / piece).ilog2())
}

/// Rows `start..start + count` of a slot with `total` rows; the slot itself for all of them.
fn rows_of(
    program: &mut ProgramBuilder,
    slot: Slot,
    total: usize,
    (start, count): (usize, usize),
) -> Result<Slot, PlanError> {
    if count == total {
        return Ok(slot);
    }
    let spec = program.slots.spec(slot);
    let width = spec.shape.elements() / total;
    let name = format!("{}[{start}..{}]", spec.name, start + count);
    program
        .slots
        .view(slot, start * width, name, [count, width])
}
