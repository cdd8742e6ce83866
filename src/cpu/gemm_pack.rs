//! Packing: the operands of a block laid out as panels, so that a register tile reads them in order.
//!
//! A panel of width `w` holds, for each step of k, the `w` elements of its lines: element `[p, j]` is
//! at `p * w + j`. Lines that do not exist are zeros; k is never padded.

use bytemuck::{Pod, Zeroable};

use crate::cpu::simd::{SimdPath, Task, Transpose, dispatch};

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

/// One panel to be packed.
pub(super) struct Panel<'a> {
    pub path: SimdPath,
    pub lines: Lines,
    /// The operand from the panel's first element on.
    pub src: &'a [f32],
    pub stride: usize,
    /// Lines that exist; at most the width.
    pub count: usize,
    pub width: usize,
    /// The panel: `k * width` floats.
    pub dst: &'a mut [f32],
}

impl Panel<'_> {
    /// Fills the panel.
    pub(super) fn pack(self) {
        match self.lines {
            Lines::Rows => self.transpose(),
            Lines::Columns => match (self.count == self.width, self.width) {
                (true, 48) => self.copy::<48>(),
                (true, 32) => self.copy::<32>(),
                (true, 16) => self.copy::<16>(),
                (true, 8) => self.copy::<8>(),
                (true, 6) => self.copy::<6>(),
                _ => self.copy_ragged(),
            },
        }
    }

    fn transpose(self) {
        let k = self.dst.len() / self.width;
        Transpose {
            src: self.src,
            src_stride: self.stride,
            dst: &mut *self.dst,
            dst_stride: self.width,
            rows: self.count,
            cols: k,
        }
        .run(self.path);
        if self.count < self.width {
            for row in self.dst.chunks_exact_mut(self.width) {
                row[self.count..].fill(0.0);
            }
        }
    }

    fn copy<const W: usize>(self) {
        dispatch(
            self.path,
            CopyRows::<W> {
                src: self.src,
                stride: self.stride,
                dst: self.dst,
            },
        );
    }

    fn copy_ragged(self) {
        for (p, row) in self.dst.chunks_exact_mut(self.width).enumerate() {
            let (filled, padding) = row.split_at_mut(self.count);
            filled.copy_from_slice(&self.src[p * self.stride..][..self.count]);
            padding.fill(0.0);
        }
    }
}

/// Copies rows of a width known to the compiler, which needs no call to a copy function.
struct CopyRows<'a, const W: usize> {
    src: &'a [f32],
    stride: usize,
    dst: &'a mut [f32],
}

impl<const W: usize> Task for CopyRows<'_, W> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let rows = self.dst.as_chunks_mut::<W>().0;
        for (p, row) in rows.iter_mut().enumerate() {
            let from = &self.src[p * self.stride..][..W];
            if let Some(from) = from.first_chunk::<W>() {
                *row = *from;
            }
        }
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

    #[test]
    fn both_ways_of_packing_give_the_same_panel() {
        for (count, width, k) in [(48, 48, 5), (47, 48, 17), (3, 8, 9), (8, 8, 24), (6, 6, 7)] {
            let value = |j: usize, p: usize| (j * 100 + p) as f32;
            let rows: Vec<f32> = (0..count * k).map(|i| value(i / k, i % k)).collect();
            let columns: Vec<f32> = (0..count * k)
                .map(|i| value(i % count, i / count))
                .collect();
            for path in SimdPath::ALL {
                let packed = |lines, src: &[f32], stride| {
                    let mut buffer = Buffer::default();
                    let dst = buffer.floats(k * width);
                    dst.fill(f32::NAN);
                    Panel {
                        path,
                        lines,
                        src,
                        stride,
                        count,
                        width,
                        dst,
                    }
                    .pack();
                    dst.to_vec()
                };
                let expected: Vec<f32> = (0..k * width)
                    .map(|i| (i / width, i % width))
                    .map(|(p, j)| if j < count { value(j, p) } else { 0.0 })
                    .collect();
                assert_eq!(packed(Lines::Rows, &rows, k), expected);
                assert_eq!(packed(Lines::Columns, &columns, count), expected);
            }
        }
    }
}
