//! Weighted cross-entropy on the CPU, in place on the logits.

use rayon::prelude::*;

use super::arena::Operands;
use super::context::CpuContext;
use super::cross_entropy_narrow::{NarrowGrad, NarrowLoss};
use super::rows::expect_len;
use super::simd::{SimdPath, Task, dispatch};
use crate::error::DeviceError;
use crate::num;
use crate::num::lanes::{lane_max, lane_reduce_rows};
use crate::num::logits::LogitRow;
use crate::op::cross_entropy::{CrossEntropy, IGNORE, LogitsAfter, LossSum};
use crate::op::step_values::{LossScale, StepScalars};
use crate::shape::DType;

/// What a row gives besides its logits.
struct RowResult {
    loss: f32,
    hit: u32,
    softmax: Softmax,
}

/// What a row's gradient needs of it.
#[derive(Clone, Copy)]
enum Softmax {
    /// Logits in f32: the log of the sum of exponentials.
    Wide(f32),
    /// Logits in bf16 or f16.
    Narrow(LogitRow),
}

struct RowLoss<'a> {
    logits: &'a [f32],
    target: usize,
    weight: f32,
}

impl Task for RowLoss<'_> {
    type Out = RowResult;

    #[inline(always)]
    fn run(self) -> RowResult {
        let logits = self.logits;
        let max = lane_max(logits);
        let sum = lane_reduce_rows([logits], |[x], acc| acc + num::exp(x - max));
        let lse = max + num::log(sum);
        let x = logits[self.target];
        RowResult {
            loss: (lse - x) * self.weight,
            hit: u32::from(x == max),
            softmax: Softmax::Wide(lse),
        }
    }
}

struct RowGrad<'a> {
    logits: &'a mut [f32],
    target: usize,
    lse: f32,
    factor: f32,
    /// What the gradient is multiplied by at last; `None` where there is no loss scale.
    scale: Option<f32>,
}

impl Task for RowGrad<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let (lse, factor) = (self.lse, self.factor);
        let target = (num::exp(self.logits[self.target] - lse) - 1.0) * factor;
        for x in self.logits.iter_mut() {
            *x = num::exp(*x - lse) * factor;
        }
        self.logits[self.target] = target;
        if let Some(scale) = self.scale {
            self.logits.iter_mut().for_each(|x| *x *= scale);
        }
    }
}

/// The operands of one call, apart from the logits.
struct Rows<'a> {
    targets: &'a [i32],
    weights: &'a [f32],
    inv_normaliser: f32,
    vocab_size: usize,
    storage: DType,
    /// The loss scale; `None` where there is none.
    scale: Option<f32>,
}

impl Rows<'_> {
    /// The target of a row that is scored. The engine has checked the range before the step.
    fn target(&self, row: usize) -> Option<usize> {
        let target = self.targets[row];
        let scored = target != IGNORE && (0..self.vocab_size as i64).contains(&i64::from(target));
        scored.then_some(target as usize)
    }

    fn result(&self, path: SimdPath, row: usize, logits: &[f32], target: usize) -> RowResult {
        let weight = self.weights[row];
        if self.storage == DType::F32 {
            let task = RowLoss {
                logits,
                target,
                weight,
            };
            return dispatch(path, task);
        }
        let task = NarrowLoss {
            logits,
            target,
            weight,
        };
        let (loss, hit, row) = dispatch(path, task);
        RowResult {
            loss,
            hit,
            softmax: Softmax::Narrow(row),
        }
    }

    /// Writes loss and hit of a row; gives the target and the softmax of a row that is scored.
    fn score(
        &self,
        path: SimdPath,
        row: usize,
        logits: &[f32],
        (loss, hit): (&mut f32, &mut u32),
    ) -> Option<(usize, Softmax)> {
        let target = self.target(row);
        let result = target.map(|target| self.result(path, row, logits, target));
        *loss = result.as_ref().map_or(0.0, |r| r.loss);
        *hit = result.as_ref().map_or(0, |r| r.hit);
        target.zip(result.map(|r| r.softmax))
    }

    /// Puts the gradient of a row in the place of its logits.
    fn grad(
        &self,
        path: SimdPath,
        row: usize,
        logits: &mut [f32],
        (target, softmax): (usize, Softmax),
    ) {
        let factor = self.weights[row] * self.inv_normaliser;
        let scale = self.scale;
        match softmax {
            Softmax::Wide(lse) => dispatch(
                path,
                RowGrad {
                    logits,
                    target,
                    lse,
                    factor,
                    scale,
                },
            ),
            Softmax::Narrow(row) => dispatch(
                path,
                NarrowGrad {
                    logits,
                    target,
                    row,
                    factor,
                    scale: scale.unwrap_or(1.0),
                    storage: self.storage,
                },
            ),
        }
    }
}

/// Loss and hit of every row, and the gradient in place where the op asks for it.
pub fn forward(
    context: &CpuContext,
    op: &CrossEntropy,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let targets: &[i32] = operands.read(0)?;
    let weights: &[f32] = operands.read(1)?;
    let scalars: &[StepScalars] = operands.read(2)?;
    expect_len("targets", op.rows, targets.len())?;
    expect_len("weights", op.rows, weights.len())?;
    expect_len("scalars", 1, scalars.len())?;
    let rows = Rows {
        targets,
        weights,
        inv_normaliser: scalars[0].inv_normaliser,
        vocab_size: op.vocab_size,
        storage: op.math.storage(),
        scale: None,
    };
    let row_loss: &mut [f32] = operands.write(0)?;
    let row_hit: &mut [u32] = operands.write(1)?;
    expect_len("row_loss", op.rows, row_loss.len())?;
    expect_len("row_hit", op.rows, row_hit.len())?;
    let path = context.path();
    let outputs = row_loss
        .par_iter_mut()
        .zip(row_hit.par_iter_mut())
        .enumerate();
    match op.after {
        LogitsAfter::Kept => {
            let logits: &[f32] = operands.read(3)?;
            expect_len("logits", op.rows * op.vocab_size, logits.len())?;
            context.run(|| {
                outputs
                    .zip(logits.par_chunks(op.vocab_size))
                    .for_each(|((row, out), logits)| {
                        rows.score(path, row, logits, out);
                    });
            });
        }
        LogitsAfter::Gradient => {
            let scale = match op.math.scales_loss() {
                true => Some(loss_scale(operands.read(3)?)?),
                false => None,
            };
            let rows = Rows { scale, ..rows };
            let logits: &mut [f32] = operands.write(2)?;
            expect_len("logits", op.rows * op.vocab_size, logits.len())?;
            let all = outputs.zip(logits.par_chunks_mut(op.vocab_size));
            context.run(|| {
                all.for_each(
                    |((row, out), logits)| match rows.score(path, row, logits, out) {
                        None => logits.fill(0.0),
                        Some(scored) => rows.grad(path, row, logits, scored),
                    },
                );
            });
        }
    }
    Ok(())
}

/// The loss scale of the step.
fn loss_scale(state: &[LossScale]) -> Result<f32, DeviceError> {
    expect_len("loss_scale", 1, state.len())?;
    Ok(state[0].scale)
}

/// The loss: row losses in token order, cut as the op says, times one over the normaliser.
pub fn loss_sum(
    _context: &CpuContext,
    op: &LossSum,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let row_loss: &[f32] = operands.read(0)?;
    let scalars: &[StepScalars] = operands.read(1)?;
    let loss: &mut [f32] = operands.write(0)?;
    expect_len("row_loss", op.sum.tokens, row_loss.len())?;
    expect_len("scalars", 1, scalars.len())?;
    expect_len("loss", 1, loss.len())?;
    let sum = op
        .sum
        .sum(|piece| row_loss[piece].iter().fold(0.0, |acc, x| acc + x));
    loss[0] = sum * scalars[0].inv_normaliser;
    Ok(())
}
