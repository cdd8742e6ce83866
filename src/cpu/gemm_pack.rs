//! Packing: the operands of a block laid out as panels, so that a register tile reads them in order.
//!
//! A panel of width `w` holds, for each step of k, the `w` elements of its lines: element `[p, j]` is
//! at `p * w + j`. Lines that do not exist are zeros; k is never padded.

use bytemuck::{Pod, Zeroable};

use crate::cpu::simd::{SimdPath, Task, Transpose, dispatch, prefetch};

/// The floats of one cache line.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// Scratch that starts on a cache line and only ever grows.
#[derive(Default)]
pub(super) struct Buffer {
    lines: Vec<Line>,
}

impl Buffer {
    /// The first `len` floats; what they hold is whatever was left there.
    pub(super) fn floats(&mut self, len: usize) -> &mut [f32] {
        let lines = len.div_ceil(16);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line::zeroed());
        }
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..len]
    }
}

/// How the lines of a panel lie in the operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lines {
    /// A line is a row of the operand: k runs along the row, and packing transposes.
    Rows,
    /// A line is a column of the operand: k runs down the column, and packing copies.
    Columns,
}

/// An operand's part to be packed: all its panels at once.
pub(super) struct Pack<'a> {
    pub path: SimdPath,
    pub lines: Lines,
    /// The operand from the part's first element on.
    pub src: &'a [f32],
    pub stride: usize,
    /// Lines, cut as [`panels`] cuts them into panels of `full` times `lanes`.
    pub count: usize,
    pub lanes: usize,
    pub full: usize,
    /// The panels, one after the other: `count` rounded up to `lanes`, times k.
    pub dst: &'a mut [f32],
}

impl Pack<'_> {
    /// Fills the panels.
    pub(super) fn run(self) {
        let padded = self.count.next_multiple_of(self.lanes);
        if padded == 0 {
            return;
        }
        let k = self.dst.len() / padded;
        match self.lines {
            Lines::Rows => self.transpose(k),
            Lines::Columns => dispatch(self.path, CopyColumns { pack: self, k }),
        }
    }

    fn transpose(self, k: usize) {
        for (start, width) in panels(self.count, self.lanes, self.full) {
            let panel = &mut self.dst[start * k..][..width * k];
            let rows = width.min(self.count - start);
            Transpose {
                src: &self.src[start * self.stride..],
                src_stride: self.stride,
                dst: panel,
                dst_stride: width,
                rows,
                cols: k,
            }
            .run(self.path);
            if rows < width {
                for row in panel.chunks_exact_mut(width) {
                    row[rows..].fill(0.0);
                }
            }
        }
    }
}

/// Steps of k that are copied together: few enough that each row's reads go on where they stopped,
/// enough that whole cache lines are written.
const COPY_STEPS: usize = 8;

/// How many steps ahead of the copy memory is asked for: rows of an operand lie pages apart, where
/// the processor does not foresee the next one.
const COPY_AHEAD: usize = 16;

/// Copies the panels of lines that are columns.
struct CopyColumns<'a> {
    pack: Pack<'a>,
    k: usize,
}

impl Task for CopyColumns<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let Pack {
            src, stride, count, ..
        } = self.pack;
        for first in (0..self.k).step_by(COPY_STEPS) {
            let steps = COPY_STEPS.min(self.k - first);
            for (start, width) in panels(count, self.pack.lanes, self.pack.full) {
                let at = start * self.k + first * width;
                let dst = &mut self.pack.dst[at..][..steps * width];
                let src = &src[first * stride + start..];
                for p in 0..COPY_STEPS {
                    for line in (0..width).step_by(16) {
                        prefetch(src, (COPY_AHEAD + p) * stride + line);
                    }
                }
                match (start + width <= count, width) {
                    (true, 48) => copy_rows::<48>(src, stride, dst),
                    (true, 32) => copy_rows::<32>(src, stride, dst),
                    (true, 16) => copy_rows::<16>(src, stride, dst),
                    (true, 8) => copy_rows::<8>(src, stride, dst),
                    (true, 6) => copy_rows::<6>(src, stride, dst),
                    _ => copy_ragged(src, stride, dst, (width.min(count - start), width)),
                }
            }
        }
    }
}

/// Copies rows of a width known to the compiler, which needs no call to a copy function.
#[inline(always)]
fn copy_rows<const W: usize>(src: &[f32], stride: usize, dst: &mut [f32]) {
    for (p, row) in dst.as_chunks_mut::<W>().0.iter_mut().enumerate() {
        if let Some(from) = src[p * stride..].first_chunk::<W>() {
            *row = *from;
        }
    }
}

/// Copies rows of `count` floats into rows of `width`, whose rest is zeros.
#[inline(always)]
fn copy_ragged(src: &[f32], stride: usize, dst: &mut [f32], (count, width): (usize, usize)) {
    for (p, row) in dst.chunks_exact_mut(width).enumerate() {
        let (filled, padding) = row.split_at_mut(count);
        filled.copy_from_slice(&src[p * stride..][..count]);
        padding.fill(0.0);
    }
}

/// Cuts `count` columns into panels of `full` vectors of `lanes`: start and width of each, in order.
///
/// A last panel of one vector would leave the multipliers waiting for its few chains, so the last
/// two panels share their vectors evenly.
pub(super) fn panels(
    count: usize,
    lanes: usize,
    full: usize,
) -> impl Iterator<Item = (usize, usize)> {
    let mut left = count.div_ceil(lanes);
    let mut start = 0;
    std::iter::from_fn(move || {
        let vectors = if full > 2 && left == full + 1 {
            left.div_ceil(2)
        } else {
            left.min(full)
        };
        let panel = (start, vectors * lanes);
        left -= vectors;
        start += panel.1;
        (vectors > 0).then_some(panel)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panels_cover_the_columns_and_share_a_short_end() {
        let of = |n| panels(n, 16, 3).collect::<Vec<_>>();
        assert_eq!(of(0), []);
        assert_eq!(of(5), [(0, 16)]);
        assert_eq!(of(64), [(0, 32), (32, 32)]);
        assert_eq!(of(128), [(0, 48), (48, 48), (96, 32)]);
        assert_eq!(panels(24, 8, 2).collect::<Vec<_>>(), [(0, 16), (16, 8)]);
    }

    /// Packs a matrix of `count` lines; returns the panels.
    fn packed(path: SimdPath, lines: Lines, count: usize, k: usize) -> Vec<f32> {
        let (src, stride): (Vec<f32>, usize) = match lines {
            Lines::Rows => ((0..count * k).map(|i| value(i / k, i % k)).collect(), k),
            Lines::Columns => {
                let of = |i: usize| value(i % count, i / count);
                ((0..count * k).map(of).collect(), count)
            }
        };
        let mut buffer = Buffer::default();
        let dst = buffer.floats(k * count.next_multiple_of(8));
        dst.fill(f32::NAN);
        Pack {
            path,
            lines,
            src: &src,
            stride,
            count,
            lanes: 8,
            full: 3,
            dst,
        }
        .run();
        dst.to_vec()
    }

    fn value(line: usize, step: usize) -> f32 {
        (1 + line * 100 + step) as f32
    }

    #[test]
    fn both_ways_of_packing_give_the_panels_as_defined() {
        for (count, k) in [(24, 5), (47, 17), (3, 9), (8, 24), (70, 7), (33, 1)] {
            let mut expected = Vec::new();
            for (start, width) in panels(count, 8, 3) {
                for p in 0..k {
                    let line = |j| if j < count { value(j, p) } else { 0.0 };
                    expected.extend((start..start + width).map(line));
                }
            }
            for path in SimdPath::ALL {
                assert_eq!(packed(path, Lines::Rows, count, k), expected);
                assert_eq!(packed(path, Lines::Columns, count, k), expected);
            }
        }
    }
}
