//! What the ops over token rows share: checks of operand sizes, the cut into tasks, sums over tokens.

use std::ops::Range;

use rayon::prelude::*;

use super::context::CpuContext;
use crate::error::DeviceError;
use crate::num::tree::{TokenSum, TreeFold};

/// Elements that make a task worth handing to another thread.
const TASK_ELEMENTS: usize = 1 << 13;

/// The fewest columns of a task that takes a part of a row: one cache line.
const LINE_COLUMNS: usize = 16;

/// Checks that the operand called `operand` has `expected` elements.
///
/// # Errors
/// [`DeviceError::OperandSize`] when it has `found` instead.
pub fn expect_len(operand: &'static str, expected: usize, found: usize) -> Result<(), DeviceError> {
    if expected == found {
        return Ok(());
    }
    Err(DeviceError::OperandSize {
        operand,
        expected,
        found,
    })
}

/// Rows of `columns` elements that make one task; at least one.
pub fn rows_per_task(columns: usize) -> usize {
    (TASK_ELEMENTS / columns.max(1)).max(1)
}

/// A part of a sum over tokens, one chain a column: `acc[j]` takes column `columns.start + j` of the
/// rows `tokens`, ascending.
pub struct Chains<'a> {
    pub tokens: Range<usize>,
    pub columns: Range<usize>,
    /// Holds `+0.0` at the start.
    pub acc: &'a mut [f32],
}

/// Sums vectors over tokens into `out`: `chain` runs the chains of one piece, then pieces and grains
/// are folded by the balanced tree. Tasks are pieces, or parts of their columns when pieces are few.
pub fn token_sums(
    context: &CpuContext,
    sum: &TokenSum,
    out: &mut [f32],
    chain: impl Fn(Chains) + Sync,
) {
    let width = out.len();
    let pieces: Vec<Range<usize>> = sum.grains().flatten().collect();
    if width == 0 {
        return;
    }
    let threads = context.threads();
    let block = match pieces.len() >= threads {
        true => width,
        false => width.div_ceil(threads).next_multiple_of(LINE_COLUMNS),
    };
    let run = |tokens: &Range<usize>, partial: &mut [f32]| {
        let blocks = partial.par_chunks_mut(block).enumerate();
        blocks.for_each(|(index, acc)| {
            let first = index * block;
            chain(Chains {
                tokens: tokens.clone(),
                columns: first..first + acc.len(),
                acc,
            });
        });
    };
    // One piece needs no fold, so its chains run in the output itself.
    if let [tokens] = pieces.as_slice() {
        out.fill(0.0);
        return context.run(|| run(tokens, out));
    }
    let mut partials = vec![0.0; pieces.len() * width];
    context.run(|| {
        let tasks = partials.par_chunks_mut(width).zip(pieces.par_iter());
        tasks.for_each(|(partial, tokens)| run(tokens, partial));
    });
    match fold(sum, &mut partials, width) {
        Some(root) => out.copy_from_slice(&partials[root * width..][..width]),
        None => out.fill(0.0),
    }
}

/// Folds the partials of all pieces in place and returns the piece whose partial became the root.
pub(super) fn fold(sum: &TokenSum, partials: &mut [f32], width: usize) -> Option<usize> {
    let mut merge = |left: usize, right: usize| {
        let (low, high) = partials.split_at_mut(right * width);
        add_to(&mut low[left * width..][..width], &high[..width]);
        left
    };
    let mut next = 0;
    let mut grains = TreeFold::new();
    for grain in sum.grains() {
        let mut pieces = TreeFold::new();
        for _ in grain {
            pieces.push(next, &mut merge);
            next += 1;
        }
        if let Some(root) = pieces.finish(&mut merge) {
            grains.push(root, &mut merge);
        }
    }
    grains.finish(&mut merge)
}

/// `left[i] = left[i] + right[i]`.
#[inline(always)]
pub fn add_to(left: &mut [f32], right: &[f32]) {
    for (l, r) in left.iter_mut().zip(right) {
        *l += r;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::SimdPath;

    #[test]
    fn a_size_that_differs_is_named() {
        assert_eq!(expect_len("dh", 6, 6), Ok(()));
        let refused = expect_len("dh", 6, 5);
        let (operand, expected, found) = ("dh", 6, 5);
        assert_eq!(
            refused,
            Err(DeviceError::OperandSize {
                operand,
                expected,
                found
            })
        );
    }

    #[test]
    fn a_task_has_at_least_one_row() {
        assert_eq!(rows_per_task(128), 64);
        assert_eq!(rows_per_task(1 << 20), 1);
        assert_eq!(rows_per_task(0), TASK_ELEMENTS);
    }

    /// Every column equals the scalar sum of the contract, however tasks are cut.
    #[test]
    fn vector_sums_equal_scalar_sums() {
        for (tokens, grain, piece) in [(0, 4, 2), (1, 1, 1), (100, 40, 16), (70, 70, 70), (9, 2, 1)]
        {
            let sum = TokenSum {
                tokens,
                grain,
                piece,
            };
            for (threads, width) in [(1, 5), (2, 33), (7, 200)] {
                let context = CpuContext::new(SimdPath::Scalar, threads).unwrap();
                let x: Vec<f32> = (0..tokens * width)
                    .map(|i| 1.0 / (i as f32 + 0.7))
                    .collect();
                let mut out = vec![f32::NAN; width];
                token_sums(&context, &sum, &mut out, |chains| {
                    for t in chains.tokens {
                        add_to(chains.acc, &x[t * width..][chains.columns.clone()]);
                    }
                });
                for (column, found) in out.iter().enumerate() {
                    let expected =
                        sum.sum(|piece| piece.fold(0.0, |a, t| a + x[t * width + column]));
                    assert_eq!(found.to_bits(), expected.to_bits(), "{sum:?} {column}");
                }
            }
        }
    }
}
