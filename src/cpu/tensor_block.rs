//! One part of a tensor-core product: its packed factors, its chains, the trees over pieces, and the store.

use std::cell::RefCell;
use std::ops::Range;

use crate::cpu::simd::{SimdPath, Task, dispatch, tensor_panel};
use crate::cpu::tensor_gemm::{TensorGemm, TensorSum};
use crate::cpu::tensor_tile::{Factor, FactorLine, LANES, Panel};
use crate::num::tensor_step::chain;
use crate::num::tree::{TokenSum, TreeFold};
use crate::op::Store;

/// Products packed at a time, a whole number of steps: a panel of B then takes 32 KB.
const BLOCK_K: usize = 256;

/// What a thread keeps between blocks, so that it allocates only when a larger block comes.
#[derive(Default)]
struct Scratch {
    a: Vec<Factor>,
    b: Vec<FactorLine>,
    sums: Vec<Vec<f32>>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// A part of the result from (`row`, `col`) on.
pub(super) struct Block<'g> {
    pub path: SimdPath,
    pub gemm: &'g TensorGemm<'g>,
    pub row: usize,
    pub col: usize,
}

/// Rows, columns and the padded columns of a block.
#[derive(Clone, Copy)]
struct Extent {
    rows: usize,
    cols: usize,
    stride: usize,
}

impl Block<'_> {
    /// Computes the part whose rows are `out`.
    pub(super) fn compute(&self, out: &mut [&mut [f32]]) {
        let cols = out.first().map_or(0, |row| row.len());
        let extent = Extent {
            rows: out.len(),
            cols,
            stride: cols.next_multiple_of(LANES),
        };
        SCRATCH.with_borrow_mut(|scratch| {
            let sums = self.sum(extent, out, scratch);
            self.store(&sums, extent, out);
            scratch.sums.push(sums);
        });
    }

    /// The sums over all of k, rows of `extent.stride`.
    fn sum(&self, extent: Extent, out: &[&mut [f32]], scratch: &mut Scratch) -> Vec<f32> {
        let k = self.gemm.k();
        match self.gemm.sum {
            TensorSum::Chain => self.piece(0..k, extent, scratch),
            TensorSum::Continue => {
                let mut sums = zeros(extent, scratch);
                for (sums, row) in sums.chunks_exact_mut(extent.stride).zip(out) {
                    sums[..extent.cols].copy_from_slice(row);
                }
                self.chain(0..k, extent, (&mut sums, scratch));
                sums
            }
            TensorSum::Tokens(tokens) => self.trees(tokens, extent, scratch),
        }
    }

    /// A chain a piece, a tree over a grain's pieces, a tree over grains.
    fn trees(&self, tokens: TokenSum, extent: Extent, scratch: &mut Scratch) -> Vec<f32> {
        let mut grains = TreeFold::new();
        for grain in tokens.grains() {
            let mut pieces = TreeFold::new();
            for piece in grain {
                let sums = self.piece(piece, extent, scratch);
                pieces.push(sums, |l, r| self.merge(l, r, scratch));
            }
            if let Some(sums) = pieces.finish(|l, r| self.merge(l, r, scratch)) {
                grains.push(sums, |l, r| self.merge(l, r, scratch));
            }
        }
        let sums = grains.finish(|l, r| self.merge(l, r, scratch));
        sums.unwrap_or_else(|| zeros(extent, scratch))
    }

    /// `left + right`, in the buffer of `left`; that of `right` is free again.
    fn merge(&self, mut left: Vec<f32>, right: Vec<f32>, scratch: &mut Scratch) -> Vec<f32> {
        for (left, right) in left.iter_mut().zip(&right) {
            *left += right;
        }
        scratch.sums.push(right);
        left
    }

    /// One chain an output over `ks`, from +0.0.
    fn piece(&self, ks: Range<usize>, extent: Extent, scratch: &mut Scratch) -> Vec<f32> {
        let mut sums = zeros(extent, scratch);
        self.chain(ks, extent, (&mut sums, scratch));
        sums
    }

    /// Goes on with every chain over `ks`.
    fn chain(&self, ks: Range<usize>, extent: Extent, to: (&mut [f32], &mut Scratch)) {
        let (sums, scratch) = to;
        for first in ks.clone().step_by(BLOCK_K) {
            let ks = first..(first + BLOCK_K).min(ks.end);
            let Scratch { a, b, .. } = &mut *scratch;
            let finite = [
                dispatch(
                    self.path,
                    PackRows {
                        block: self,
                        ks: ks.clone(),
                        extent,
                        to: a,
                    },
                ),
                dispatch(
                    self.path,
                    PackColumns {
                        block: self,
                        ks: ks.clone(),
                        extent,
                        to: b,
                    },
                ),
            ];
            if finite != [true; 2] {
                self.chain_by_rule(ks, extent, sums);
                continue;
            }
            let k = self.padded(&ks);
            for (b, col) in b.chunks_exact(k).zip((0..extent.stride).step_by(LANES)) {
                let panel = Panel {
                    kind: self.gemm.kind,
                    a,
                    b,
                    sums: &mut sums[col..],
                    stride: extent.stride,
                };
                tensor_panel(self.path, panel);
            }
        }
    }

    /// `ks` in whole steps.
    fn padded(&self, ks: &Range<usize>) -> usize {
        ks.len().next_multiple_of(self.gemm.kind.k())
    }

    /// As `chain`, through the rule itself: for factors that are not finite.
    fn chain_by_rule(&self, ks: Range<usize>, extent: Extent, sums: &mut [f32]) {
        let gemm = self.gemm;
        for (r, sums) in sums.chunks_exact_mut(extent.stride).enumerate() {
            let a: Vec<f32> = ks.clone().map(|k| gemm.left(self.row + r, k)).collect();
            for (c, sum) in sums[..extent.cols].iter_mut().enumerate() {
                let b: Vec<f32> = ks.clone().map(|k| gemm.right(k, self.col + c)).collect();
                *sum = chain(gemm.kind, *sum, &a, &b);
            }
        }
    }

    /// Writes the final sums to the block's rows of the result.
    fn store(&self, sums: &[f32], extent: Extent, out: &mut [&mut [f32]]) {
        let bias = self.gemm.bias.map(|b| &b[self.col..][..extent.cols]);
        for (to, sums) in out.iter_mut().zip(sums.chunks_exact(extent.stride)) {
            for (c, (to, &sum)) in to.iter_mut().zip(sums).enumerate() {
                let value = bias.map_or(sum, |bias| sum + bias[c]);
                *to = match self.gemm.store {
                    Store::Assign => value,
                    Store::Add => *to + value,
                };
            }
        }
    }
}

/// Sums of zero for a block.
fn zeros(extent: Extent, scratch: &mut Scratch) -> Vec<f32> {
    let mut sums = scratch.sums.pop().unwrap_or_default();
    sums.clear();
    sums.resize(extent.rows * extent.stride, 0.0);
    sums
}

/// Packs the block's rows of A over `ks`; tells whether all were finite.
struct PackRows<'a> {
    block: &'a Block<'a>,
    ks: Range<usize>,
    extent: Extent,
    to: &'a mut Vec<Factor>,
}

impl Task for PackRows<'_> {
    type Out = bool;

    #[inline(always)]
    fn run(self) -> bool {
        let PackRows {
            block,
            ks,
            extent,
            to,
        } = self;
        let k = block.padded(&ks);
        to.clear();
        to.resize(extent.rows * k, Factor::ZERO);
        let mut finite = true;
        for (r, row) in to.chunks_exact_mut(k.max(1)).enumerate() {
            for (to, k) in row.iter_mut().zip(ks.clone()) {
                let x = block.gemm.left(block.row + r, k);
                finite &= x.is_finite();
                *to = Factor::of(block.gemm.kind, x);
            }
        }
        finite
    }
}

/// Packs the block's columns of B over `ks` into panels; tells whether all were finite.
struct PackColumns<'a> {
    block: &'a Block<'a>,
    ks: Range<usize>,
    extent: Extent,
    to: &'a mut Vec<FactorLine>,
}

impl Task for PackColumns<'_> {
    type Out = bool;

    #[inline(always)]
    fn run(self) -> bool {
        let PackColumns {
            block,
            ks,
            extent,
            to,
        } = self;
        let k = block.padded(&ks);
        to.clear();
        to.resize(extent.stride / LANES * k, FactorLine::ZERO);
        let mut finite = true;
        for (panel, lines) in to.chunks_exact_mut(k.max(1)).enumerate() {
            let first = panel * LANES;
            let lanes = LANES.min(extent.cols - first);
            for (line, k) in lines.iter_mut().zip(ks.clone()) {
                for lane in 0..lanes {
                    let x = block.gemm.right(k, block.col + first + lane);
                    finite &= x.is_finite();
                    let factor = Factor::of(block.gemm.kind, x);
                    line.significands[lane] = factor.significand;
                    line.exponents[lane] = factor.exponent;
                }
            }
        }
        finite
    }
}
