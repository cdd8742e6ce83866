//! The head in row chunks: product, cross-entropy and their backward, one chunk of logits at a time.

use super::{ParamArenas, PlanConfig, StepInputs, StepOutputs, TokenCut};
use crate::error::PlanError;
use crate::grad::GradBuilder;
use crate::grad::recompute::{Repeated, Stretch};
use crate::model::Head;
use crate::num::tree::{ROW_PIECE, TreeFold, weight_piece};
use crate::op::cross_entropy::{CrossEntropy, LogitsAfter, LossSum};
use crate::op::matmul::Matmul;
use crate::op::tree_add::TreeAdd;
use crate::op::{OpCall, Slot, Store};
use crate::program::ProgramBuilder;
use crate::shape::Role;

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
    /// All chunks' logits in one tensor.
    buffer: Slot,
    /// The calls of the body that backward computes again.
    stretches: Vec<Stretch>,
}

/// How many logits exist at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsKept {
    /// Those of one chunk.
    Chunk,
    /// Those of every row, for the caller to compute a loss from.
    All,
}

/// Where the loss of a program goes.
#[derive(Clone, Copy, Debug)]
pub struct LossPlace {
    /// By whose normaliser the sum of losses is divided.
    pub scalars: Slot,
    pub loss: Slot,
}

/// What a derivation came to.
pub struct Reached {
    /// The parameters that got a gradient.
    pub parameters: Vec<Slot>,
    /// Second contributions that are kept apart.
    pub seconds: Vec<(Slot, Slot)>,
    /// The calls that backward computes again.
    pub repeated: Vec<Repeated>,
}

impl Reached {
    /// What `grads` has come to.
    pub fn of(grads: &GradBuilder) -> Self {
        Reached {
            parameters: grads.reached().collect(),
            seconds: grads.seconds(),
            repeated: grads.repeated(),
        }
    }
}

/// Whether a parameter's second contribution is added at once or kept for a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seconds {
    Added,
    Apart,
}

/// The most chunks of a head: each is several calls, and a plan of more takes minutes.
const MOST_CHUNKS: usize = 1 << 16;

impl HeadPlan {
    /// Declares the logits and the views of every chunk.
    pub fn declare(
        program: &mut ProgramBuilder,
        head: Head,
        (inputs, outputs): (&StepInputs, StepOutputs),
        (config, kept, stretches): (&PlanConfig, LogitsKept, Vec<Stretch>),
    ) -> Result<Self, PlanError> {
        let total = inputs.rows();
        let cut = config.cut();
        let grain = cut.grain.min(total);
        let most = (config.chunk_logits / head.vocab_size.max(1)).max(1);
        let default = || weight_piece(config.math, grain, head.vocab_size * head.d_model);
        let piece = cut.piece.unwrap_or_else(default);
        let rows = chunk_rows(piece, most, grain).min(total);
        let found = total.div_ceil(rows.max(1));
        if found > MOST_CHUNKS {
            return Err(PlanError::Size {
                what: "chunks of the head",
                expected: "at most 65536, by fewer tokens in a step or a smaller vocabulary",
                found,
            });
        }
        let kept_rows = match kept {
            LogitsKept::Chunk => rows,
            LogitsKept::All => total,
        };
        let buffer = program.narrow_activation("logits", [kept_rows, head.vocab_size]);
        if kept == LogitsKept::All {
            program.slots.set_role(buffer, Role::Report);
        }
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
                    logits: match kept {
                        LogitsKept::Chunk => rows_of(program, buffer, rows, (0, count))?,
                        LogitsKept::All => rows_of(program, buffer, total, (start, count))?,
                    },
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
            buffer,
            stretches,
        })
    }

    /// The logits slot of every chunk and the chunk's first row.
    pub fn logits(&self) -> Vec<(Slot, usize)> {
        self.chunks.iter().map(|c| (c.logits, c.start)).collect()
    }

    /// The logits of all rows, where they are kept.
    pub fn buffer(&self) -> Slot {
        self.buffer
    }

    /// The place of the loss of a whole batch.
    pub fn whole_loss(&self) -> LossPlace {
        LossPlace {
            scalars: self.scalars,
            loss: self.outputs.loss,
        }
    }

    /// Appends forward and loss alone.
    pub fn evaluate(&self, program: &mut ProgramBuilder, loss: LossPlace) {
        for chunk in &self.chunks {
            self.product(program, chunk);
            self.cross_entropy(program, chunk, LogitsAfter::Kept);
        }
        self.loss(program, loss);
    }

    /// Appends the head with its backward, the backward of `body`, and the loss.
    pub fn step(
        &self,
        program: &mut ProgramBuilder,
        body: &[OpCall],
        (arenas, seconds, loss): (ParamArenas, Seconds, LossPlace),
    ) -> Result<Reached, PlanError> {
        let mut grads = GradBuilder::new(program, self.cut, (arenas.param, arenas.grad));
        if seconds == Seconds::Apart {
            grads.keep_apart();
        }
        self.derive(&mut grads, |grads, chunk| {
            Ok(grads.forward(|program| {
                self.product(program, chunk);
                self.cross_entropy(program, chunk, LogitsAfter::Gradient);
            }))
        })?;
        grads.backward_recomputed(body, &self.stretches)?;
        let reached = Reached::of(&grads);
        self.loss(program, loss);
        Ok(reached)
    }

    /// Appends the products of all chunks: the end of the forward half.
    pub fn products(&self, program: &mut ProgramBuilder) {
        self.chunks.iter().for_each(|c| self.product(program, c));
    }

    /// Appends the cross-entropy of the kept logits, which become its gradient, and the loss.
    pub fn score(&self, program: &mut ProgramBuilder, loss: LossPlace) {
        for chunk in &self.chunks {
            self.cross_entropy(program, chunk, LogitsAfter::Gradient);
        }
        self.loss(program, loss);
    }

    /// Appends the backward half, from the gradient that stands in the place of the kept logits. `forward` has the
    /// calls of the forward half, `body` those before its products.
    pub fn backward_half(
        &self,
        program: &mut ProgramBuilder,
        (forward, body): (&[OpCall], &[OpCall]),
        arenas: ParamArenas,
    ) -> Result<Reached, PlanError> {
        let places = (self.cut, (arenas.param, arenas.grad));
        let mut grads = GradBuilder::over(program, forward, places);
        grads.keep_apart();
        let mut products = forward[body.len()..].iter();
        self.derive(&mut grads, |grads, chunk| {
            grads.share(chunk.logits, chunk.logits, "forward")?;
            let product = products.find(|call| call.writes.contains(&chunk.logits));
            Ok(product.cloned().into_iter().collect())
        })?;
        grads.backward_recomputed(body, &self.stretches)?;
        Ok(Reached::of(&grads))
    }

    /// The backward of every chunk; `calls_of` gives the chunk's forward calls.
    fn derive(
        &self,
        grads: &mut GradBuilder,
        mut calls_of: impl FnMut(&mut GradBuilder, &Chunk) -> Result<Vec<OpCall>, PlanError>,
    ) -> Result<(), PlanError> {
        let mut levels = match grads.is_trainable(self.head.weight) {
            true => Some(Levels::over(self.head, grads)?),
            false => None,
        };
        let mut grains: TreeFold<usize> = TreeFold::new();
        let mut pieces: TreeFold<usize> = TreeFold::new();
        for (index, chunk) in self.chunks.iter().enumerate() {
            let calls = calls_of(grads, chunk)?;
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
                None => (levels.take(grads), Store::Assign),
            };
            grads.redirect(self.head.weight, Some((levels.slots[level], store)));
            grads.backward(&calls)?;
            grads.forget(chunk.logits);
            grads.redirect(self.head.weight, None);
            pieces.push(level, |a, b| levels.merge(grads, a, b));
            if last {
                let done = std::mem::take(&mut pieces);
                if let Some(level) = done.finish(|a, b| levels.merge(grads, a, b)) {
                    grains.push(level, |a, b| levels.merge(grads, a, b));
                }
            }
        }
        if let Some(levels) = &mut levels {
            grains.finish(|a, b| levels.merge(grads, a, b));
            grads.mark_assigned(self.head.weight)?;
        }
        Ok(())
    }

    fn product(&self, program: &mut ProgramBuilder, chunk: &Chunk) {
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
    }

    fn cross_entropy(&self, program: &mut ProgramBuilder, chunk: &Chunk, after: LogitsAfter) {
        let (rows, vocab_size) = (chunk.rows, self.head.vocab_size);
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

    fn loss(&self, program: &mut ProgramBuilder, place: LossPlace) {
        let op = LossSum {
            sum: self.cut.sum(self.rows, Some(ROW_PIECE)),
        };
        let reads = vec![self.outputs.row_loss, place.scalars];
        program.call(op, reads, vec![place.loss]);
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
/// of whole grains, or within a grain a piece, perhaps shortened, times a power of two.
fn chunk_rows(piece: usize, most: usize, grain: usize) -> usize {
    if grain <= most {
        return grain * (1 << (most / grain).ilog2());
    }
    let piece = piece.min(1 << most.ilog2());
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
