//! One block of a matrix product: its chains, the tree over its pieces, and the store.
//!
//! A block's sums stay in scratch that fits the second-level cache until they are final, so the
//! partial sums of pieces never reach the result. The order of a block's loops: pieces, then blocks
//! of k, then panels of columns (which stay in the first-level cache), then rows.

use std::cell::RefCell;
use std::ops::Range;

use crate::cpu::gemm::{Form, Gemm, Store};
use crate::cpu::gemm_pack::{Buffer, Lines, Pack, panels};
use crate::cpu::simd::{SimdPath, Start, Task, Tile, dispatch};
use crate::num::tree::{TokenSum, TreeFold};

/// Steps of k a panel covers: 192 × 48 floats are three quarters of a 48 KB first-level cache.
const BLOCK_K: usize = 192;

/// The most columns of a block; whole panels on every path.
const BLOCK_COLS: usize = 384;

/// The most rows of a block. Its sums take 384 KB then and its packed operands at most 480 KB, which
/// leaves room for a row band of A in a 2 MB second-level cache.
pub(super) const BLOCK_ROWS: usize = 256;

/// What a thread keeps between blocks, so that it allocates only when a larger block comes.
#[derive(Default)]
struct Scratch {
    a: Buffer,
    b: Buffer,
    sums: Vec<Buffer>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Computes the part of a product whose first output is at (`row`, `col`); `out` holds its rows.
pub(super) fn compute_part(
    path: SimdPath,
    gemm: &Gemm,
    (row, col): (usize, usize),
    out: &mut [&mut [f32]],
) {
    let width = out.first().map_or(0, |r| r.len());
    SCRATCH.with_borrow_mut(|scratch| {
        for (r, rows) in out.chunks_mut(BLOCK_ROWS).enumerate() {
            for start in (0..width).step_by(BLOCK_COLS) {
                let end = (start + BLOCK_COLS).min(width);
                let first = row + r * BLOCK_ROWS;
                let block = Block {
                    path,
                    gemm,
                    rows: first..first + rows.len(),
                    cols: col + start..col + end,
                };
                let mut sums = block.sum(scratch);
                block.store(sums.floats(block.len()), start, rows);
                scratch.sums.push(sums);
            }
        }
    });
}

/// Rows and columns of the result whose sums are in scratch at one time.
struct Block<'g> {
    path: SimdPath,
    gemm: &'g Gemm<'g>,
    rows: Range<usize>,
    cols: Range<usize>,
}

impl Block<'_> {
    /// Floats from one row of the sums to the next: the columns, padded to whole vectors.
    fn stride(&self) -> usize {
        let lanes = self.path.tile_shape().lanes;
        self.cols.len().div_ceil(lanes) * lanes
    }

    fn len(&self) -> usize {
        self.rows.len() * self.stride()
    }

    /// The sums over all of k: a chain a piece, a tree over a grain's pieces, a tree over grains.
    fn sum(&self, scratch: &mut Scratch) -> Buffer {
        let Scratch { a, b, sums } = scratch;
        let k = self.gemm.k();
        let one_chain = TokenSum {
            tokens: k,
            grain: k,
            piece: k,
        };
        let mut grains = TreeFold::new();
        for grain in self.gemm.sum.unwrap_or(one_chain).grains() {
            let mut pieces = TreeFold::new();
            for piece in grain {
                let mut sum = sums.pop().unwrap_or_default();
                self.chain(piece, sum.floats(self.len()), (a, b));
                pieces.push(sum, |l, r| self.merge(l, r, sums));
            }
            if let Some(sum) = pieces.finish(|l, r| self.merge(l, r, sums)) {
                grains.push(sum, |l, r| self.merge(l, r, sums));
            }
        }
        grains
            .finish(|l, r| self.merge(l, r, sums))
            .unwrap_or_else(|| {
                let mut zero = sums.pop().unwrap_or_default();
                zero.floats(self.len()).fill(0.0);
                zero
            })
    }

    /// `left + right`, in the buffer of `left`; that of `right` is free again.
    fn merge(&self, mut left: Buffer, mut right: Buffer, free: &mut Vec<Buffer>) -> Buffer {
        let len = self.len();
        dispatch(
            self.path,
            AddTo {
                to: left.floats(len),
                from: right.floats(len),
            },
        );
        free.push(right);
        left
    }

    /// One chain an output over `piece`, from +0.0 on.
    fn chain(&self, piece: Range<usize>, sums: &mut [f32], (a, b): (&mut Buffer, &mut Buffer)) {
        let blocks = piece.len().div_ceil(BLOCK_K).max(1);
        let step = piece.len().div_ceil(blocks).max(1);
        let mut start = Start::Zero;
        for first in piece.clone().step_by(step) {
            let ks = first..(first + step).min(piece.end);
            let b = self.pack_b(ks.clone(), b);
            match self.gemm.form {
                Form::Tn => {
                    let a = Left::Packed(self.pack_a(ks.clone(), a));
                    self.tiles(ks, a, b, (sums, start));
                }
                Form::Nt | Form::Nn => self.tiles(ks, Left::InPlace, b, (sums, start)),
            }
            start = Start::Resume;
        }
    }

    /// Runs every register tile of the block over the steps `ks`.
    fn tiles(&self, ks: Range<usize>, a: Left, b: &[f32], (sums, start): (&mut [f32], Start)) {
        let shape = self.path.tile_shape();
        let (k, stride) = (ks.len(), self.stride());
        for (col, width) in panels(self.cols.len(), shape.lanes, shape.vectors) {
            for row in (0..self.rows.len()).step_by(shape.rows) {
                let (a, a_row, a_step) = match a {
                    Left::Packed(panels) => (&panels[row * k..], 1, shape.rows),
                    Left::InPlace => {
                        let a = self.gemm.a;
                        let at = (self.rows.start + row) * a.stride + ks.start;
                        (&a.data[at..], a.stride, 1)
                    }
                };
                Tile {
                    rows: shape.rows.min(self.rows.len() - row),
                    width,
                    k,
                    a,
                    a_row,
                    a_step,
                    b: &b[col * k..],
                    c: &mut sums[row * stride + col..],
                    c_row: stride,
                    start,
                }
                .run(self.path);
            }
        }
    }

    /// The block's columns of B over the steps `ks`, in panels of columns.
    fn pack_b<'s>(&self, ks: Range<usize>, scratch: &'s mut Buffer) -> &'s [f32] {
        let (shape, b) = (self.path.tile_shape(), self.gemm.b);
        let packed = scratch.floats(ks.len() * self.stride());
        let (lines, at) = match self.gemm.form {
            Form::Nt => (Lines::Rows, self.cols.start * b.stride + ks.start),
            Form::Nn | Form::Tn => (Lines::Columns, ks.start * b.stride + self.cols.start),
        };
        Pack {
            path: self.path,
            lines,
            src: &b.data[at..],
            stride: b.stride,
            count: self.cols.len(),
            lanes: shape.lanes,
            full: shape.vectors,
            dst: &mut *packed,
        }
        .run();
        packed
    }

    /// The block's columns of a transposed A over the steps `ks`, in panels of a tile's rows.
    fn pack_a<'s>(&self, ks: Range<usize>, scratch: &'s mut Buffer) -> &'s [f32] {
        let (rows, a) = (self.path.tile_shape().rows, self.gemm.a);
        let packed = scratch.floats(ks.len() * self.rows.len().next_multiple_of(rows));
        Pack {
            path: self.path,
            lines: Lines::Columns,
            src: &a.data[ks.start * a.stride + self.rows.start..],
            stride: a.stride,
            count: self.rows.len(),
            lanes: rows,
            full: 1,
            dst: &mut *packed,
        }
        .run();
        packed
    }

    /// Writes the final sums to the block's rows of the result, whose columns begin at `col`.
    fn store(&self, sums: &[f32], col: usize, rows: &mut [&mut [f32]]) {
        let cols = self.cols.len();
        for (row, sums) in rows.iter_mut().zip(sums.chunks_exact(self.stride())) {
            dispatch(
                self.path,
                StoreRow {
                    to: &mut row[col..][..cols],
                    sums: &sums[..cols],
                    bias: self.gemm.bias.map(|b| &b[self.cols.clone()]),
                    store: self.gemm.store,
                },
            );
        }
    }
}

/// Where a tile finds the rows of A.
#[derive(Clone, Copy)]
enum Left<'a> {
    /// In the operand itself, whose rows run along k.
    InPlace,
    /// In panels of a tile's rows.
    Packed(&'a [f32]),
}

/// `to += from`, element by element.
struct AddTo<'a> {
    to: &'a mut [f32],
    from: &'a [f32],
}

impl Task for AddTo<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        for (to, from) in self.to.iter_mut().zip(self.from) {
            *to += from;
        }
    }
}

/// Stores one row of sums.
struct StoreRow<'a> {
    to: &'a mut [f32],
    sums: &'a [f32],
    bias: Option<&'a [f32]>,
    store: Store,
}

impl Task for StoreRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let StoreRow { to, sums, .. } = self;
        match (self.bias, self.store) {
            (None, Store::Assign) => to.copy_from_slice(sums),
            (None, Store::Add) => {
                for (to, sum) in to.iter_mut().zip(sums) {
                    *to += sum;
                }
            }
            (Some(bias), Store::Assign) => {
                for ((to, sum), bias) in to.iter_mut().zip(sums).zip(bias) {
                    *to = sum + bias;
                }
            }
            (Some(bias), Store::Add) => {
                for ((to, sum), bias) in to.iter_mut().zip(sums).zip(bias) {
                    *to += sum + bias;
                }
            }
        }
    }
}
