//! One part of a tensor-core product: its packed factors, its chains, the trees over pieces, and the store.

use std::cell::RefCell;
use std::ops::Range;

use crate::cpu::gemm::Form;
use crate::cpu::simd::{SimdPath, Task, Transpose, dispatch, tensor_panel};
use crate::cpu::tensor_gemm::{Elements, TensorGemm, TensorMat, TensorSum};
use crate::cpu::tensor_tile::{Factor, FactorLine, LANES, Panel};
use crate::num::round::{bf16_to_f32, f16_to_f32};
use crate::num::tensor_step::{Kind, chain};
use crate::num::tree::{TokenSum, TreeFold};
use crate::op::Store;

/// Products packed at a time, a whole number of steps: a panel of B then takes 32 KB.
const BLOCK_K: usize = 256;

/// What a thread keeps between blocks, so that it allocates only when a larger block comes.
#[derive(Default)]
struct Scratch {
    a: Vec<Factor>,
    b: Vec<FactorLine>,
    /// Values of a part of an operand, as they are packed and as they are stored.
    values: Vec<f32>,
    stored: Vec<f32>,
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

/// How the lines that are read lie in an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Along {
    Rows,
    Columns,
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
            let finite = [
                self.pack_a(ks.clone(), extent, scratch),
                self.pack_b(ks.clone(), extent, scratch),
            ];
            if finite != [true; 2] {
                self.chain_by_rule(ks, extent, sums);
                continue;
            }
            let k = self.padded(&ks);
            let Scratch { a, b, .. } = &*scratch;
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

    /// Packs the block's rows of A over `ks`; tells whether all were finite.
    fn pack_a(&self, ks: Range<usize>, extent: Extent, scratch: &mut Scratch) -> bool {
        let lines = self.row..self.row + extent.rows;
        let along = match self.gemm.form {
            Form::Nt | Form::Nn => Along::Rows,
            Form::Tn => Along::Columns,
        };
        self.read(self.gemm.a, (lines, ks.clone()), along, scratch);
        let Scratch { a, values, .. } = scratch;
        let pack = PackFactors {
            kind: self.gemm.kind,
            values,
            width: ks.len(),
            to: Packed::Rows(a, self.padded(&ks)),
        };
        dispatch(self.path, pack)
    }

    /// Packs the block's columns of B over `ks`; tells whether all were finite.
    fn pack_b(&self, ks: Range<usize>, extent: Extent, scratch: &mut Scratch) -> bool {
        let columns = self.col..self.col + extent.cols;
        let along = match self.gemm.form {
            Form::Nn | Form::Tn => Along::Rows,
            Form::Nt => Along::Columns,
        };
        self.read(self.gemm.b, (ks.clone(), columns), along, scratch);
        let Scratch { b, values, .. } = scratch;
        let pack = PackFactors {
            kind: self.gemm.kind,
            values,
            width: extent.cols,
            to: Packed::Panels(b, self.padded(&ks)),
        };
        dispatch(self.path, pack)
    }

    /// Leaves `[lines, width]` of an operand in `scratch.values`, whichever way it is stored.
    fn read(
        &self,
        mat: TensorMat,
        (lines, across): (Range<usize>, Range<usize>),
        along: Along,
        scratch: &mut Scratch,
    ) {
        let Scratch { values, stored, .. } = scratch;
        let (count, width) = (lines.len(), across.len());
        let (rows, cols, to) = match along {
            Along::Rows => (lines, across, &mut *values),
            Along::Columns => (across, lines, &mut *stored),
        };
        let kind = self.gemm.kind;
        dispatch(
            self.path,
            ReadValues {
                kind,
                mat,
                rows,
                cols,
                to,
            },
        );
        if along == Along::Columns {
            values.clear();
            values.resize(count * width, 0.0);
            Transpose {
                src: stored,
                src_stride: count,
                dst: values,
                dst_stride: width,
                rows: width,
                cols: count,
            }
            .run(self.path);
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

/// Packs factors of an operand; tells whether all were finite.
struct PackFactors<'a> {
    kind: Kind,
    /// `[lines, k]` for A, `[k, columns]` for B.
    values: &'a [f32],
    /// Values of one row of `values`.
    width: usize,
    to: Packed<'a>,
}

/// Where packed factors go.
enum Packed<'a> {
    /// Rows of A, each padded to this many factors.
    Rows(&'a mut Vec<Factor>, usize),
    /// Panels of columns of B, each of this many lines.
    Panels(&'a mut Vec<FactorLine>, usize),
}

impl Task for PackFactors<'_> {
    type Out = bool;

    #[inline(always)]
    fn run(self) -> bool {
        let PackFactors {
            kind,
            values,
            width,
            to,
        } = self;
        match to {
            Packed::Rows(to, k) => {
                to.clear();
                to.resize(values.len() / width * k, Factor::ZERO);
                for (to, row) in to.chunks_exact_mut(k).zip(values.chunks_exact(width)) {
                    for (to, &x) in to.iter_mut().zip(row) {
                        *to = Factor::of(kind, x);
                    }
                }
            }
            Packed::Panels(to, k) => {
                to.clear();
                to.resize(width.div_ceil(LANES) * k, FactorLine::ZERO);
                for (p, row) in values.chunks_exact(width).enumerate() {
                    for (panel, lanes) in row.chunks(LANES).enumerate() {
                        pack_line(kind, lanes, &mut to[panel * k + p]);
                    }
                }
            }
        }
        let all = |bits: u32, x: &f32| bits.max(x.to_bits() & 0x7fff_ffff);
        values.iter().fold(0, all) < f32::INFINITY.to_bits()
    }
}

/// Packs the lanes of one k. A whole line has a fixed number of lanes, which the compiler makes vectors of.
#[inline(always)]
fn pack_line(kind: Kind, lanes: &[f32], line: &mut FactorLine) {
    let Some(lanes) = lanes.first_chunk::<LANES>() else {
        for (lane, &x) in lanes.iter().enumerate() {
            let factor = Factor::of(kind, x);
            (line.significands[lane], line.exponents[lane]) = (factor.significand, factor.exponent);
        }
        return;
    };
    for (lane, &x) in lanes.iter().enumerate() {
        let factor = Factor::of(kind, x);
        (line.significands[lane], line.exponents[lane]) = (factor.significand, factor.exponent);
    }
}

/// Reads a part of an operand as numbers of the format, row by row.
struct ReadValues<'a> {
    kind: Kind,
    mat: TensorMat<'a>,
    rows: Range<usize>,
    cols: Range<usize>,
    to: &'a mut Vec<f32>,
}

impl Task for ReadValues<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let ReadValues {
            kind,
            mat,
            rows,
            cols,
            to,
        } = self;
        to.clear();
        to.reserve(rows.len() * cols.len());
        for row in rows {
            let at = row * mat.stride + cols.start..row * mat.stride + cols.end;
            // A kind an arm, so that each loop is compiled for its own rounding.
            match (mat.elements, kind) {
                (Elements::F32(x), Kind::Bf16) => {
                    to.extend(x[at].iter().map(|&x| Kind::Bf16.round(x)))
                }
                (Elements::F32(x), Kind::Tf32) => {
                    to.extend(x[at].iter().map(|&x| Kind::Tf32.round(x)))
                }
                (Elements::F32(x), Kind::F16) => {
                    to.extend(x[at].iter().map(|&x| Kind::F16.round(x)))
                }
                (Elements::Bits(x), Kind::F16) => to.extend(x[at].iter().map(|&x| f16_to_f32(x))),
                (Elements::Bits(x), _) => to.extend(x[at].iter().map(|&x| bf16_to_f32(x))),
            }
        }
    }
}
