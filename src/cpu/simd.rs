//! The CPU's vector instructions: which are there, running plain loops with them, and the register
//! tile of the matrix product. The only file of the CPU backend in which `unsafe` may stand.
//!
//! A path never decides a bit: every kernel here vectorises over outputs and leaves each output's
//! own chain of roundings alone.
#![allow(unsafe_code)]

pub use crate::cpu::simd_path::SimdPath;
use crate::cpu::tensor_tile::Panel;
#[cfg(target_arch = "x86_64")]
use crate::cpu::tensor_x86;

/// Plain code to be compiled once for every path.
pub trait Task {
    /// What the code returns.
    type Out;

    /// The code. Implementors write `#[inline(always)]`, without which it is compiled for the
    /// baseline only; so are the functions it calls unless they are inlined too.
    fn run(self) -> Self::Out;
}

/// Runs `task` compiled for `path`, or for the widest detected path below it.
pub fn dispatch<T: Task>(path: SimdPath, task: T) -> T::Out {
    match path.usable() {
        SimdPath::Scalar => task.run(),
        // SAFETY: `usable` returns a path above Scalar only when `probe` detected its features.
        #[cfg(target_arch = "x86_64")]
        SimdPath::Avx2 => unsafe { x86::run_avx2(task) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        SimdPath::Avx512 => unsafe { x86::run_avx512(task) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => task.run(),
    }
}

/// Runs a panel of tensor-core chains with the instructions of `path`.
pub(super) fn tensor_panel(path: SimdPath, panel: Panel) {
    match path.usable() {
        SimdPath::Scalar => panel.run(),
        // SAFETY: `usable` returns a path above Scalar only when `probe` detected its features.
        #[cfg(target_arch = "x86_64")]
        SimdPath::Avx2 => unsafe { tensor_x86::chains_avx2(panel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        SimdPath::Avx512 => unsafe { tensor_x86::chains_avx512(panel) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => panel.run(),
    }
}

/// Asks for the cache line of `data[at]`, which need not exist; changes nothing else.
#[inline(always)]
pub(super) fn prefetch(data: &[f32], at: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is in the baseline of x86-64, and a prefetch of an invalid address is ignored.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(data.as_ptr().wrapping_add(at).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (data, at);
}

/// The register tile: at most `rows` × (`vectors` · `lanes`) outputs at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileShape {
    pub rows: usize,
    pub lanes: usize,
    pub vectors: usize,
}

impl SimdPath {
    /// The register tile of the matrix product on this path.
    pub(super) fn tile_shape(self) -> TileShape {
        let (rows, lanes, vectors) = match self {
            SimdPath::Scalar => (4, 4, 2),
            SimdPath::Avx2 => (6, 8, 2),
            SimdPath::Avx512 => (8, 16, 3),
        };
        TileShape {
            rows,
            lanes,
            vectors,
        }
    }
}

/// Where a tile's chains start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// At +0.0; what C holds is not read.
    Zero,
    /// At the values in C, which is how a chain goes on over the next block of k.
    Resume,
}

/// One tile of a matrix product: `c[r, j] = fma(a[r, p], b[p, j], c[r, j])` for ascending `p` in `0..k`.
pub(super) struct Tile<'a> {
    /// Outputs of the tile; `width` is a whole number of vectors.
    pub rows: usize,
    pub width: usize,
    /// Steps of every chain.
    pub k: usize,
    /// Element `a[r, p]` is at `r * a_row + p * a_step`.
    pub a: &'a [f32],
    pub a_row: usize,
    pub a_step: usize,
    /// A packed panel: element `b[p, j]` is at `p * width + j`.
    pub b: &'a [f32],
    /// Element `c[r, j]` is at `r * c_row + j`.
    pub c: &'a mut [f32],
    pub c_row: usize,
    pub start: Start,
}

impl Tile<'_> {
    /// Computes the tile with the instructions of `path`.
    pub(super) fn run(mut self, path: SimdPath) {
        if self.rows == 0 || self.width == 0 {
            return;
        }
        self.check();
        let done = match path.usable() {
            SimdPath::Scalar => false,
            // SAFETY: the features were detected, and `check` has shown that every index the tile
            // reads or writes is inside its slice.
            #[cfg(target_arch = "x86_64")]
            SimdPath::Avx2 => unsafe { x86::tile_avx2(&mut self) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            SimdPath::Avx512 => unsafe { x86::tile_avx512(&mut self) },
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        };
        if !done {
            self.run_portable();
        }
    }

    /// Panics when an index is outside its slice, which would be a fault of the caller in this crate.
    fn check(&self) {
        let last = self.rows - 1;
        if self.k > 0 {
            let steps = (self.k - 1).saturating_mul(self.a_step);
            assert!(steps.saturating_add(last.saturating_mul(self.a_row)) < self.a.len());
            assert!(self.k.saturating_mul(self.width) <= self.b.len());
        }
        let rows = last.saturating_mul(self.c_row);
        assert!(rows.saturating_add(self.width) <= self.c.len());
    }

    /// The tile in plain code, for any shape.
    fn run_portable(&mut self) {
        for r in 0..self.rows {
            let row = &mut self.c[r * self.c_row..][..self.width];
            if self.start == Start::Zero {
                row.fill(0.0);
            }
            for (p, b) in self.b.chunks_exact(self.width).take(self.k).enumerate() {
                let a = self.a[r * self.a_row + p * self.a_step];
                for (c, &b) in row.iter_mut().zip(b) {
                    *c = a.mul_add(b, *c);
                }
            }
        }
    }
}

/// Transposes the leading `rows` × `cols` of a matrix: `dst[p * dst_stride + j] = src[j * src_stride + p]`.
pub(super) struct Transpose<'a> {
    pub src: &'a [f32],
    pub src_stride: usize,
    pub dst: &'a mut [f32],
    pub dst_stride: usize,
    pub rows: usize,
    pub cols: usize,
}

impl Transpose<'_> {
    /// Moves the elements; on the vector paths in blocks of 8 × 8.
    pub(super) fn run(mut self, path: SimdPath) {
        if self.rows == 0 || self.cols == 0 {
            return;
        }
        let end = |lines: usize, stride: usize, len| {
            (lines - 1).saturating_mul(stride).saturating_add(len)
        };
        assert!(end(self.rows, self.src_stride, self.cols) <= self.src.len());
        assert!(end(self.cols, self.dst_stride, self.rows) <= self.dst.len());
        let (rows, cols) = self.whole_blocks(path);
        self.elements(rows..self.rows, 0..self.cols);
        self.elements(0..rows, cols..self.cols);
    }

    /// Moves the blocks of 8 × 8, if the path has them; returns the rows and columns they cover.
    #[cfg(target_arch = "x86_64")]
    fn whole_blocks(&mut self, path: SimdPath) -> (usize, usize) {
        if path.usable() == SimdPath::Scalar {
            return (0, 0);
        }
        // SAFETY: AVX was detected, and `run` has asserted that the last row and column lie inside
        // both slices, hence so does every element of a whole block.
        unsafe { x86::transpose_blocks(self) };
        (self.rows / 8 * 8, self.cols / 8 * 8)
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn whole_blocks(&mut self, _: SimdPath) -> (usize, usize) {
        (0, 0)
    }

    /// Moves the elements of a part one by one.
    fn elements(&mut self, rows: std::ops::Range<usize>, cols: std::ops::Range<usize>) {
        for j in rows {
            for p in cols.clone() {
                self.dst[p * self.dst_stride + j] = self.src[j * self.src_stride + p];
            }
        }
    }
}

/// Floating-point operations of one round of [`fma_rounds`].
pub(super) const FMA_ROUND_FLOPS: usize = 2 * 16 * 16;

/// Runs `rounds` rounds of 256 independent fused multiply-adds in registers; returns their sum, so
/// that none is optimised away.
pub(super) fn fma_rounds(path: SimdPath, rounds: usize) -> f32 {
    match path.usable() {
        // SAFETY: the features were detected.
        #[cfg(target_arch = "x86_64")]
        SimdPath::Avx2 => unsafe { x86::fma_rounds_avx2(rounds) },
        // SAFETY: the features were detected.
        #[cfg(target_arch = "x86_64")]
        SimdPath::Avx512 => unsafe { x86::fma_rounds_avx512(rounds) },
        _ => {
            let mut acc = [1.0f32; 16];
            for _ in 0..rounds * 16 {
                for a in &mut acc {
                    *a = a.mul_add(0.5, 1.0);
                }
            }
            acc.iter().sum()
        }
    }
}

/// The kernels written with the processor's own instructions.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Start, Task, Tile, Transpose};

    #[target_feature(enable = "avx2,fma")]
    pub fn run_avx2<T: Task>(task: T) -> T::Out {
        task.run()
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub fn run_avx512<T: Task>(task: T) -> T::Out {
        task.run()
    }

    /// Defines one register tile of `R` rows × `V` vectors, all of whose accumulators stay in
    /// registers, so that memory is read once a step of k and C once a call.
    macro_rules! tile_kernel {
        ($name:ident, $features:literal, $lanes:literal, $zero:ident, $load:ident, $store:ident, $splat:ident, $fma:ident) => {
            /// # Safety
            /// `Tile::check` holds, `rows` is `R` and `width` is `V` vectors.
            #[target_feature(enable = $features)]
            unsafe fn $name<const R: usize, const V: usize>(t: &mut Tile) {
                let mut acc = [[$zero(); V]; R];
                let c = t.c.as_mut_ptr();
                // SAFETY: `check` bounds every index below: c by (R-1) * c_row + V * lanes, a by
                // (R-1) * a_row + (k-1) * a_step, b by k * V * lanes. The pointers move with
                // `wrapping_add`, since after the last step they may lie beyond their slices.
                unsafe {
                    if t.start == Start::Resume {
                        for r in 0..R {
                            for v in 0..V {
                                acc[r][v] = $load(c.add(r * t.c_row + v * $lanes));
                            }
                        }
                    }
                    let (mut a, mut b) = (t.a.as_ptr(), t.b.as_ptr());
                    let next = a.wrapping_add(R * t.a_row);
                    for p in 0..t.k {
                        // Fetches the next tile's rows, a cache line a step and all of them within
                        // half the steps. A prefetch of any address is harmless.
                        let line = (p % 8) * t.a_row + p / 8 * 16;
                        _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(line).cast());
                        let mut column = [$zero(); V];
                        for v in 0..V {
                            column[v] = $load(b.add(v * $lanes));
                        }
                        for r in 0..R {
                            let x = $splat(*a.add(r * t.a_row));
                            for v in 0..V {
                                acc[r][v] = $fma(x, column[v], acc[r][v]);
                            }
                        }
                        a = a.wrapping_add(t.a_step);
                        b = b.wrapping_add(V * $lanes);
                    }
                    for r in 0..R {
                        for v in 0..V {
                            $store(c.add(r * t.c_row + v * $lanes), acc[r][v]);
                        }
                    }
                }
            }
        };
    }

    tile_kernel!(
        kernel_avx512,
        "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma",
        16,
        _mm512_setzero_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_set1_ps,
        _mm512_fmadd_ps
    );
    tile_kernel!(
        kernel_avx2,
        "avx2,fma",
        8,
        _mm256_setzero_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_set1_ps,
        _mm256_fmadd_ps
    );

    /// Calls the kernel compiled for the tile's shape; false when there is none.
    macro_rules! by_shape {
        ($kernel:ident, $tile:ident, $lanes:literal, [$($r:literal)*], $vs:tt) => {
            match $tile.rows {
                $($r => by_shape!(@row $kernel, $tile, $lanes, $r, $vs),)*
                _ => return false,
            }
        };
        (@row $kernel:ident, $tile:ident, $lanes:literal, $r:literal, [$($v:literal)*]) => {
            match $tile.width {
                // SAFETY: the caller of this function vouches for `check`; the two matches fix R and V.
                $(w if w == $v * $lanes => unsafe { $kernel::<$r, $v>($tile) },)*
                _ => return false,
            }
        };
    }

    /// # Safety
    /// `Tile::check` holds.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub unsafe fn tile_avx512(tile: &mut Tile) -> bool {
        by_shape!(kernel_avx512, tile, 16, [1 2 3 4 5 6 7 8], [1 2 3]);
        true
    }

    /// # Safety
    /// `Tile::check` holds.
    #[target_feature(enable = "avx2,fma")]
    pub unsafe fn tile_avx2(tile: &mut Tile) -> bool {
        by_shape!(kernel_avx2, tile, 8, [1 2 3 4 5 6], [1 2]);
        true
    }

    /// Transposes the whole blocks of 8 × 8.
    ///
    /// # Safety
    /// The last element of both matrices lies inside its slice.
    #[target_feature(enable = "avx2,fma")]
    pub unsafe fn transpose_blocks(t: &mut Transpose) {
        for j in (0..t.rows / 8 * 8).step_by(8) {
            for p in (0..t.cols / 8 * 8).step_by(8) {
                let mut block = [_mm256_setzero_ps(); 8];
                for (i, row) in block.iter_mut().enumerate() {
                    // SAFETY: row j + i and columns p..p + 8 are inside the source.
                    *row =
                        unsafe { _mm256_loadu_ps(t.src.as_ptr().add((j + i) * t.src_stride + p)) };
                }
                let block = transposed(block);
                for (i, row) in block.iter().enumerate() {
                    let at = (p + i) * t.dst_stride + j;
                    // SAFETY: row p + i and columns j..j + 8 are inside the destination.
                    unsafe { _mm256_storeu_ps(t.dst.as_mut_ptr().add(at), *row) };
                }
            }
        }
    }

    /// The transpose of eight rows: pairs of rows, then pairs of pairs, then halves.
    #[target_feature(enable = "avx2,fma")]
    fn transposed(r: [__m256; 8]) -> [__m256; 8] {
        let pair = |a, b| (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let ((a0, a1), (b0, b1)) = (pair(r[0], r[1]), pair(r[2], r[3]));
        let ((c0, c1), (d0, d1)) = (pair(r[4], r[5]), pair(r[6], r[7]));
        let quad = |a, b| {
            (
                _mm256_shuffle_ps::<0x44>(a, b),
                _mm256_shuffle_ps::<0xEE>(a, b),
            )
        };
        let ((e0, e1), (e2, e3)) = (quad(a0, b0), quad(a1, b1));
        let ((f0, f1), (f2, f3)) = (quad(c0, d0), quad(c1, d1));
        let low = |a, b| _mm256_permute2f128_ps::<0x20>(a, b);
        let high = |a, b| _mm256_permute2f128_ps::<0x31>(a, b);
        [
            low(e0, f0),
            low(e1, f1),
            low(e2, f2),
            low(e3, f3),
            high(e0, f0),
            high(e1, f1),
            high(e2, f2),
            high(e3, f3),
        ]
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub fn fma_rounds_avx512(rounds: usize) -> f32 {
        let (half, one) = (_mm512_set1_ps(0.5), _mm512_set1_ps(1.0));
        let mut acc = [one; 16];
        for _ in 0..rounds {
            for a in &mut acc {
                *a = _mm512_fmadd_ps(*a, half, one);
            }
        }
        acc.iter().map(|&a| _mm512_reduce_add_ps(a)).sum()
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn fma_rounds_avx2(rounds: usize) -> f32 {
        let (half, one) = (_mm256_set1_ps(0.5), _mm256_set1_ps(1.0));
        let mut acc = [one; 8];
        for _ in 0..rounds * 4 {
            for a in &mut acc {
                *a = _mm256_fmadd_ps(*a, half, one);
            }
        }
        acc.iter()
            .map(|&a| _mm_cvtss_f32(_mm256_castps256_ps128(a)))
            .sum()
    }
}

#[cfg(test)]
#[path = "simd_tests.rs"]
mod tests;
