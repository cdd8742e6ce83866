//! Matrix products in f32: every output is one `fma` chain over ascending k, from +0.0.
//!
//! Work is cut over the outputs alone, never over k, so neither the SIMD path nor the number of
//! threads decides a bit. A sum over tokens is cut by a [`TokenSum`]: a chain a piece, the balanced
//! tree over a grain's pieces, the tree over the grains.

use rayon::prelude::*;

use crate::cpu::context::CpuContext;
use crate::cpu::gemm_block::{BLOCK_ROWS, compute_part};
use crate::cpu::rows::expect_len;
use crate::error::DeviceError;
use crate::num::tree::TokenSum;
pub use crate::op::Store;

/// Products of fewer multiply-adds than this run on one thread: waking another costs more.
const SHARED_FROM: usize = 1 << 18;

/// Rows below which a further cut of the rows costs more packing than its balance is worth.
const SHORT_BAND: usize = 128;

/// A matrix that is read: row `r`, column `c` is `data[r * stride + c]`.
#[derive(Clone, Copy, Debug)]
pub struct Mat<'a> {
    pub data: &'a [f32],
    pub rows: usize,
    pub cols: usize,
    /// Floats from one row to the next; at least `cols`.
    pub stride: usize,
}

impl<'a> Mat<'a> {
    /// A matrix whose rows follow each other without gaps.
    pub fn tight(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Mat {
            data,
            rows,
            cols,
            stride: cols,
        }
    }
}

/// A matrix that is written; what lies between `cols` and `stride` is left alone.
#[derive(Debug)]
pub struct MatMut<'a> {
    pub data: &'a mut [f32],
    pub rows: usize,
    pub cols: usize,
    /// Floats from one row to the next; at least `cols`.
    pub stride: usize,
}

impl<'a> MatMut<'a> {
    /// A matrix whose rows follow each other without gaps.
    pub fn tight(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        MatMut {
            data,
            rows,
            cols,
            stride: cols,
        }
    }
}

/// Which operand is transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `C[m, n] = A[m, k] · B[n, k]ᵀ`: a linear layer's forward.
    Nt,
    /// `C[m, n] = A[m, k] · B[k, n]`: its input gradient.
    Nn,
    /// `C[m, n] = A[k, m]ᵀ · B[k, n]`: its weight gradient, with k the tokens.
    Tn,
}

/// One matrix product.
#[derive(Clone, Copy, Debug)]
pub struct Gemm<'a> {
    pub form: Form,
    pub a: Mat<'a>,
    pub b: Mat<'a>,
    /// `[n]`: added once to each finished sum, before the store.
    pub bias: Option<&'a [f32]>,
    /// How the sum over k is cut; one chain when there is none.
    pub sum: Option<TokenSum>,
    pub store: Store,
}

impl Gemm<'_> {
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

    /// Steps of each sum.
    pub fn k(&self) -> usize {
        self.extents().k()
    }

    fn check(&self, c: &MatMut) -> Result<(), DeviceError> {
        let tokens = self.sum.map(|sum| sum.tokens);
        self.extents().check(c, self.bias, tokens)?;
        let (a, b) = (self.a, self.b);
        fits(
            ["a: stride", "a"],
            [a.rows, a.cols],
            [a.stride, a.data.len()],
        )?;
        fits(
            ["b: stride", "b"],
            [b.rows, b.cols],
            [b.stride, b.data.len()],
        )?;
        fits(
            ["c: stride", "c"],
            [c.rows, c.cols],
            [c.stride, c.data.len()],
        )
    }
}

/// A product's form and the rows and columns of its operands, whatever their elements are.
#[derive(Clone, Copy)]
pub(super) struct Extents {
    pub form: Form,
    pub a: [usize; 2],
    pub b: [usize; 2],
}

impl Extents {
    /// Rows of the result.
    pub fn m(&self) -> usize {
        match self.form {
            Form::Nt | Form::Nn => self.a[0],
            Form::Tn => self.a[1],
        }
    }

    /// Columns of the result.
    pub fn n(&self) -> usize {
        match self.form {
            Form::Nt => self.b[0],
            Form::Nn | Form::Tn => self.b[1],
        }
    }

    /// Terms of each sum.
    pub fn k(&self) -> usize {
        match self.form {
            Form::Nt | Form::Nn => self.a[1],
            Form::Tn => self.a[0],
        }
    }

    /// Checks that the operands fit each other, the result, the bias and the tokens of a cut sum.
    ///
    /// # Errors
    /// [`DeviceError::OperandSize`] with the first that does not.
    pub fn check(
        &self,
        c: &MatMut,
        bias: Option<&[f32]>,
        tokens: Option<usize>,
    ) -> Result<(), DeviceError> {
        let b_k = match self.form {
            Form::Nt => self.b[1],
            Form::Nn | Form::Tn => self.b[0],
        };
        expect_len("b: k", self.k(), b_k)?;
        expect_len("c: rows", self.m(), c.rows)?;
        expect_len("c: columns", self.n(), c.cols)?;
        if let Some(bias) = bias {
            expect_len("bias", self.n(), bias.len())?;
        }
        if let Some(tokens) = tokens {
            expect_len("sum: tokens", self.k(), tokens)?;
        }
        Ok(())
    }
}

/// Checks that `rows` rows of `cols` elements, one every `stride`, lie apart and inside `len` elements.
pub(super) fn fits(
    [stride_name, name]: [&'static str; 2],
    [rows, cols]: [usize; 2],
    [stride, len]: [usize; 2],
) -> Result<(), DeviceError> {
    if rows == 0 || cols == 0 {
        return Ok(());
    }
    if stride < cols {
        return expect_len(stride_name, cols, stride);
    }
    let needed = (rows - 1).saturating_mul(stride).saturating_add(cols);
    if len < needed {
        return expect_len(name, needed, len);
    }
    Ok(())
}

/// Computes `gemm` into `c`, every element of which is written.
///
/// # Errors
/// [`DeviceError::OperandSize`] when extents, strides or lengths do not fit each other; `c` is
/// unchanged then.
pub fn gemm(context: &CpuContext, gemm: &Gemm, c: MatMut) -> Result<(), DeviceError> {
    gemm.check(&c)?;
    if c.rows == 0 || c.cols == 0 {
        return Ok(());
    }
    let grid = Grid::choose(context, gemm);
    let job = Job {
        context,
        gemm,
        grid,
    };
    if grid.threads == 1 {
        job.alone(c);
    } else if grid.cols >= c.cols {
        context.run(|| job.by_rows(c));
    } else {
        context.run(|| job.by_rows_and_columns(c));
    }
    Ok(())
}

/// How a result is cut among threads: parts of `rows` × `cols` outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Grid {
    threads: usize,
    rows: usize,
    cols: usize,
}

impl Grid {
    /// Bands of rows while there are enough of them, and groups of columns besides where not.
    fn choose(context: &CpuContext, gemm: &Gemm) -> Grid {
        let (m, n) = (gemm.m(), gemm.n());
        let work = m.saturating_mul(n).saturating_mul(gemm.k());
        let threads = if work < SHARED_FROM {
            1
        } else {
            context.threads()
        };
        let shape = context.path().tile_shape();
        let tiles = m.div_ceil(shape.rows);
        if threads == 1 || tiles >= 2 * threads {
            let for_balance = (2 * threads).min(m / SHORT_BAND);
            let bands = m.div_ceil(BLOCK_ROWS).max(for_balance);
            let bands = bands.next_multiple_of(threads);
            return Grid {
                threads,
                rows: tiles.div_ceil(bands) * shape.rows,
                cols: n,
            };
        }
        let bands = (tiles / 2).max(1);
        let vectors = n.div_ceil(shape.lanes);
        let groups = threads.div_ceil(bands).min(vectors);
        Grid {
            threads,
            rows: tiles.div_ceil(bands) * shape.rows,
            cols: vectors.div_ceil(groups) * shape.lanes,
        }
    }
}

/// A product together with how it is cut.
struct Job<'a> {
    context: &'a CpuContext,
    gemm: &'a Gemm<'a>,
    grid: Grid,
}

impl Job<'_> {
    fn part(&self, at: (usize, usize), rows: &mut [&mut [f32]]) {
        compute_part(self.context.path(), self.gemm, at, rows);
    }

    fn alone(&self, c: MatMut) {
        let mut rows = rows_of(c.data, c.stride, c.cols);
        self.part((0, 0), &mut rows[..c.rows]);
    }

    fn by_rows(&self, c: MatMut) {
        let used = (c.rows - 1) * c.stride + c.cols;
        c.data[..used]
            .par_chunks_mut(self.grid.rows * c.stride)
            .enumerate()
            .for_each(|(i, band)| {
                let mut rows = rows_of(band, c.stride, c.cols);
                self.part((i * self.grid.rows, 0), &mut rows);
            });
    }

    fn by_rows_and_columns(&self, c: MatMut) {
        let Grid { rows, cols, .. } = self.grid;
        let groups = c.cols.div_ceil(cols);
        let mut parts: Vec<_> = (0..c.rows.div_ceil(rows) * groups)
            .map(|i| ((i / groups * rows, i % groups * cols), Vec::new()))
            .collect();
        for (r, row) in rows_of(c.data, c.stride, c.cols)
            .into_iter()
            .take(c.rows)
            .enumerate()
        {
            for (g, group) in row.chunks_mut(cols).enumerate() {
                parts[r / rows * groups + g].1.push(group);
            }
        }
        parts
            .into_par_iter()
            .for_each(|(at, mut rows)| self.part(at, &mut rows));
    }
}

/// The rows of a matrix, apart from each other.
fn rows_of(data: &mut [f32], stride: usize, cols: usize) -> Vec<&mut [f32]> {
    data.chunks_mut(stride)
        .filter_map(|row| row.get_mut(..cols))
        .collect()
}

#[cfg(test)]
#[path = "gemm_tests.rs"]
mod tests;
