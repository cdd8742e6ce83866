//! Matrix products of the tensor-core domains: every output is a chain of tensor-core steps over ascending k.
//!
//! [`crate::num::tensor_step`] is the rule; this is the same rule over many outputs at once. Work is cut over
//! outputs alone, so neither the SIMD path nor the number of threads decides a bit. A block with an infinity
//! or a NaN among its factors goes through the rule itself, output by output.

use rayon::prelude::*;

use crate::cpu::context::CpuContext;
use crate::cpu::gemm::{Extents, Form, MatMut, fits};
use crate::cpu::rows::expect_len;
use crate::cpu::simd::SimdPath;
use crate::cpu::tensor_block::Block;
use crate::error::DeviceError;
use crate::num::round::{bf16_to_f32, f16_to_f32};
use crate::num::tensor_step::Kind;
use crate::num::tree::TokenSum;
use crate::op::Store;

/// Products of fewer multiply-adds than this run on one thread: waking another costs more.
const SHARED_FROM: usize = 1 << 16;

/// The most rows and columns of a part of the result.
const PART_ROWS: usize = 128;
const PART_COLS: usize = 256;

/// Parts a thread should have at least, so that the last ones do not leave threads idle.
const PARTS_PER_THREAD: usize = 4;

/// The elements of an operand.
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a> {
    /// Numbers that are rounded to the product's format as they are read; a number of the format stays.
    F32(&'a [f32]),
    /// The bits of the product's 16-bit format.
    Bits(&'a [u16]),
}

impl Elements<'_> {
    fn len(&self) -> usize {
        match self {
            Elements::F32(x) => x.len(),
            Elements::Bits(x) => x.len(),
        }
    }

    /// The element at `index`, as a number of the format.
    #[inline(always)]
    pub(super) fn value(&self, kind: Kind, index: usize) -> f32 {
        match (self, kind) {
            (Elements::F32(x), _) => kind.round(x[index]),
            (Elements::Bits(x), Kind::F16) => f16_to_f32(x[index]),
            (Elements::Bits(x), _) => bf16_to_f32(x[index]),
        }
    }
}

/// A matrix that is read: row `r`, column `c` is element `r * stride + c`.
#[derive(Clone, Copy, Debug)]
pub struct TensorMat<'a> {
    pub elements: Elements<'a>,
    pub rows: usize,
    pub cols: usize,
    /// Elements from one row to the next; at least `cols`.
    pub stride: usize,
}

impl<'a> TensorMat<'a> {
    /// A matrix whose rows follow each other without gaps.
    pub fn tight(elements: Elements<'a>, rows: usize, cols: usize) -> Self {
        TensorMat {
            elements,
            rows,
            cols,
            stride: cols,
        }
    }
}

/// How the sum over k is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorSum {
    /// One chain from +0.0.
    Chain,
    /// One chain that goes on from what the result holds.
    Continue,
    /// A chain from +0.0 for each piece of tokens, and the f32 trees over pieces and grains.
    Tokens(TokenSum),
}

/// One product of a tensor-core domain.
#[derive(Clone, Copy, Debug)]
pub struct TensorGemm<'a> {
    pub kind: Kind,
    pub form: Form,
    pub a: TensorMat<'a>,
    pub b: TensorMat<'a>,
    /// `[n]`: added once to each finished sum in f32, before the store.
    pub bias: Option<&'a [f32]>,
    pub sum: TensorSum,
    pub store: Store,
}

impl TensorGemm<'_> {
    /// The product's form and the extents of its operands.
    fn extents(&self) -> Extents {
        Extents {
            form: self.form,
            a: [self.a.rows, self.a.cols],
            b: [self.b.rows, self.b.cols],
        }
    }

    /// Rows of the result.
    pub fn m(&self) -> usize {
        self.extents().m()
    }

    /// Columns of the result.
    pub fn n(&self) -> usize {
        self.extents().n()
    }

    /// Products of each sum.
    pub fn k(&self) -> usize {
        self.extents().k()
    }

    /// The factor of row `row` at `k`.
    #[inline(always)]
    pub(super) fn left(&self, row: usize, k: usize) -> f32 {
        let at = match self.form {
            Form::Nt | Form::Nn => row * self.a.stride + k,
            Form::Tn => k * self.a.stride + row,
        };
        self.a.elements.value(self.kind, at)
    }

    /// The factor of column `col` at `k`.
    #[inline(always)]
    pub(super) fn right(&self, k: usize, col: usize) -> f32 {
        let at = match self.form {
            Form::Nt => col * self.b.stride + k,
            Form::Nn | Form::Tn => k * self.b.stride + col,
        };
        self.b.elements.value(self.kind, at)
    }

    fn check(&self, c: &MatMut) -> Result<(), DeviceError> {
        let tokens = match self.sum {
            TensorSum::Tokens(sum) => Some(sum.tokens),
            TensorSum::Chain | TensorSum::Continue => None,
        };
        self.extents().check(c, self.bias, tokens)?;
        for (name, mat) in [
            ("a: bytes of an element", self.a),
            ("b: bytes of an element", self.b),
        ] {
            if self.kind == Kind::Tf32 && matches!(mat.elements, Elements::Bits(_)) {
                expect_len(name, 4, 2)?;
            }
        }
        let (a, b) = (self.a, self.b);
        fits(
            ["a: stride", "a"],
            [a.rows, a.cols],
            [a.stride, a.elements.len()],
        )?;
        fits(
            ["b: stride", "b"],
            [b.rows, b.cols],
            [b.stride, b.elements.len()],
        )?;
        fits(
            ["c: stride", "c"],
            [c.rows, c.cols],
            [c.stride, c.data.len()],
        )
    }
}

/// Computes `gemm` into `c`, every element of which is written.
///
/// # Errors
/// [`DeviceError::OperandSize`] when extents, strides or lengths do not fit each other, or tf32 is asked of
/// 16-bit elements; `c` is unchanged then.
pub fn tensor_gemm(context: &CpuContext, gemm: &TensorGemm, c: MatMut) -> Result<(), DeviceError> {
    gemm.check(&c)?;
    if c.rows == 0 || c.cols == 0 {
        return Ok(());
    }
    let work = c.rows.saturating_mul(c.cols).saturating_mul(gemm.k());
    let threads = if work < SHARED_FROM {
        1
    } else {
        context.threads()
    };
    let parts = parts(c, threads);
    let block = |part: Part| {
        let Part { row, col, mut out } = part;
        let block = Block {
            path: context.path(),
            gemm,
            row,
            col,
        };
        block.compute(&mut out);
    };
    match threads {
        1 => parts.into_iter().for_each(block),
        _ => context.run(|| parts.into_par_iter().for_each(block)),
    }
    Ok(())
}

/// As [`tensor_gemm`], on the calling thread alone, for sizes that the caller has checked.
pub(super) fn tensor_gemm_alone(path: SimdPath, gemm: &TensorGemm, c: MatMut) {
    for Part { row, col, mut out } in parts(c, 1) {
        let block = Block {
            path,
            gemm,
            row,
            col,
        };
        block.compute(&mut out);
    }
}

/// A part of the result: its first row and column, and its rows.
struct Part<'a> {
    row: usize,
    col: usize,
    out: Vec<&'a mut [f32]>,
}

/// The result cut into parts of whole panels: fewer rows first, then fewer columns, until threads have enough.
fn parts(c: MatMut, threads: usize) -> Vec<Part> {
    let wanted = if threads == 1 {
        1
    } else {
        threads * PARTS_PER_THREAD
    };
    let count = |rows: usize, cols: usize| c.rows.div_ceil(rows) * c.cols.div_ceil(cols);
    let (mut rows, mut cols) = (PART_ROWS, PART_COLS);
    while count(rows, cols) < wanted && rows > 16 {
        rows /= 2;
    }
    while count(rows, cols) < wanted && cols > 16 {
        cols /= 2;
    }
    let groups = c.cols.div_ceil(cols);
    let mut parts: Vec<Part> = (0..c.rows.div_ceil(rows) * groups)
        .map(|i| Part {
            row: i / groups * rows,
            col: i % groups * cols,
            out: Vec::new(),
        })
        .collect();
    let width = c.cols;
    for (r, row) in c.data.chunks_mut(c.stride).take(c.rows).enumerate() {
        for (g, group) in row[..width].chunks_mut(cols).enumerate() {
            parts[r / rows * groups + g].out.push(group);
        }
    }
    parts
}

#[cfg(test)]
#[path = "tensor_gemm_tests.rs"]
mod tests;
