//! The balanced binary tree that combines partial sums, and how a sum over tokens is cut.
//!
//! For `n` leaves the tree splits at the largest power of two below `n`, as BLAKE3's does. The same
//! tree can be built from the left with a stack: after leaf `i`, one merge for each trailing one of
//! `i`; after the last leaf the stack is merged from the right. Both forms are tested to be equal.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::shape::Math;

/// How many merges follow leaf `index` while the tree is built from the left.
///
/// A merge replaces the two newest partials `left, right` by `left + right`.
pub fn merges_after(index: usize) -> u32 {
    index.trailing_ones()
}

/// Folds partials, given in order, into the balanced tree by a streaming stack.
#[derive(Clone, Debug, Default)]
pub struct TreeFold<T> {
    stack: Vec<T>,
    leaves: usize,
}

impl<T> TreeFold<T> {
    /// An empty fold.
    pub fn new() -> Self {
        TreeFold {
            stack: Vec::new(),
            leaves: 0,
        }
    }

    /// Takes the next leaf; `merge(left, right)` combines two partials.
    pub fn push(&mut self, leaf: T, mut merge: impl FnMut(T, T) -> T) {
        let mut carry = leaf;
        for _ in 0..merges_after(self.leaves) {
            if let Some(left) = self.stack.pop() {
                carry = merge(left, carry);
            }
        }
        self.stack.push(carry);
        self.leaves += 1;
    }

    /// Whether there was no leaf yet.
    pub fn is_empty(&self) -> bool {
        self.stack.is_empty()
    }

    /// The partial that the next leaf is the right side of as soon as it is there.
    pub fn left_of_next(&self) -> Option<&T> {
        match merges_after(self.leaves) {
            0 => None,
            _ => self.stack.last(),
        }
    }

    /// The partial that the next leaf is the right side of where no leaf follows.
    pub fn left_of_last(&self) -> Option<&T> {
        self.stack.last()
    }

    /// The root, or `None` when there was no leaf.
    pub fn finish(mut self, mut merge: impl FnMut(T, T) -> T) -> Option<T> {
        let mut carry = self.stack.pop()?;
        while let Some(left) = self.stack.pop() {
            carry = merge(left, carry);
        }
        Some(carry)
    }
}

/// The tree over f32 partials in order; `+0.0` for none.
pub fn tree_sum(partials: impl IntoIterator<Item = f32>) -> f32 {
    let mut fold = TreeFold::new();
    for p in partials {
        fold.push(p, |a, b| a + b);
    }
    fold.finish(|a, b| a + b).unwrap_or(0.0)
}

/// How a sum over token positions is cut: a chain within a piece, a tree over the pieces of a grain,
/// a tree over the grains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TokenSum {
    /// Positions summed in all.
    pub tokens: usize,
    /// Positions of one grain; a whole number of sequences.
    pub grain: usize,
    /// Positions of one piece; the last piece of a grain may be shorter.
    pub piece: usize,
}

impl TokenSum {
    /// The pieces of every grain, in order: one inner list a grain.
    pub fn grains(&self) -> impl Iterator<Item = impl Iterator<Item = Range<usize>>> {
        let (tokens, grain, piece) = (self.tokens, self.grain.max(1), self.piece.max(1));
        (0..tokens).step_by(grain).map(move |start| {
            let end = (start + grain).min(tokens);
            (start..end)
                .step_by(piece)
                .map(move |s| s..(s + piece).min(end))
        })
    }

    /// The number of pieces over all grains.
    pub fn pieces(&self) -> usize {
        self.grains().map(Iterator::count).sum()
    }

    /// Sums one value: `chain(range)` gives the chain over one piece.
    pub fn sum(&self, mut chain: impl FnMut(Range<usize>) -> f32) -> f32 {
        let mut outer = TreeFold::new();
        for grain in self.grains() {
            let mut fold = TreeFold::new();
            for piece in grain {
                fold.push(chain(piece), |a, b| a + b);
            }
            outer.push(fold.finish(|a, b| a + b).unwrap_or(0.0), |a, b| a + b);
        }
        outer.finish(|a, b| a + b).unwrap_or(0.0)
    }
}

/// Tokens a piece of the sums that run over whole rows: bias, norm-weight and loss sums.
pub const ROW_PIECE: usize = 32;

/// Outputs that keep a large GPU busy in one matrix product: 256 tiles of 128 × 128 for kernels of f32 and tf32, of which several share a
/// multiprocessor, and 64 for those of 16-bit factors, which lose more by folding pieces than by a last round that is not full.
const fn outputs_in_flight(math: Math) -> usize {
    match math {
        Math::F32 | Math::Tf32 => 1 << 22,
        Math::Bf16 | Math::F16 => 1 << 20,
    }
}

/// The shortest piece of a weight gradient, in tokens.
const SHORTEST_PIECE: usize = 128;

/// Tokens a piece of a weight gradient with `outputs` elements over grains of `grain` tokens.
///
/// The number of pieces is the power of two that brings pieces × outputs to the outputs in flight,
/// so a small gradient is cut finely and a large one is a single chain.
pub fn weight_piece(math: Math, grain: usize, outputs: usize) -> usize {
    let wanted = outputs_in_flight(math)
        .div_ceil(outputs.max(1))
        .next_power_of_two();
    let grain_pow2 = grain.max(1).next_power_of_two();
    (grain_pow2 / wanted.min(grain_pow2)).max(SHORTEST_PIECE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The recursive definition, from which the streaming form must not differ.
    fn recursive(p: &[f32]) -> f32 {
        match p.len() {
            0 => 0.0,
            1 => p[0],
            n => {
                let split = n.next_power_of_two() / 2;
                recursive(&p[..split]) + recursive(&p[split..])
            }
        }
    }

    #[test]
    fn the_stack_builds_the_recursive_tree() {
        for n in 0..200 {
            let p: Vec<f32> = (0..n).map(|i| 1.0 / (i as f32 + 0.7)).collect();
            assert_eq!(
                tree_sum(p.iter().copied()).to_bits(),
                recursive(&p).to_bits(),
                "{n} leaves"
            );
        }
    }

    #[test]
    fn a_leaf_knows_its_left_side_before_it_is_there() {
        for n in 1..40 {
            let mut fold: TreeFold<Range<usize>> = TreeFold::new();
            for i in 0..n {
                let told = match i + 1 == n {
                    true => fold.left_of_last().cloned(),
                    false => fold.left_of_next().cloned(),
                };
                let mut found = None;
                let mut merge = |left: Range<usize>, right: Range<usize>| {
                    assert_eq!(left.end, right.start);
                    if right == (i..i + 1) {
                        found = Some(left.clone());
                    }
                    left.start..right.end
                };
                fold.push(i..i + 1, &mut merge);
                if i + 1 == n {
                    assert_eq!(std::mem::take(&mut fold).finish(&mut merge), Some(0..n));
                }
                assert_eq!(told, found, "leaf {i} of {n}");
            }
        }
    }

    #[test]
    fn cutting_covers_every_token_once() {
        let cut = TokenSum {
            tokens: 100,
            grain: 40,
            piece: 16,
        };
        let all: Vec<_> = cut.grains().flatten().collect();
        assert_eq!(
            all,
            [
                0..16,
                16..32,
                32..40,
                40..56,
                56..72,
                72..80,
                80..96,
                96..100
            ]
        );
        assert_eq!(cut.pieces(), 8);
    }

    #[test]
    fn a_piece_is_shorter_for_smaller_gradients_and_never_below_128() {
        for math in [Math::F32, Math::Tf32] {
            assert_eq!(weight_piece(math, 8192, 768 * 2048), 2048);
            assert_eq!(weight_piece(math, 8192, 50304 * 768), 8192);
            assert_eq!(weight_piece(math, 1024, 128 * 384), 128);
            assert_eq!(weight_piece(math, 72, 64 * 64), 128);
        }
        for math in [Math::Bf16, Math::F16] {
            assert_eq!(weight_piece(math, 8192, 768 * 2048), 8192);
            assert_eq!(weight_piece(math, 8192, 768 * 768), 4096);
            assert_eq!(weight_piece(math, 4096, 80 * 1536), 256);
            assert_eq!(weight_piece(math, 1024, 128 * 384), 128);
        }
    }
}
