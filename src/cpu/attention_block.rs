//! The products of attention over one block of rows and one tile of the rows that they meet.
//!
//! A block's own rows are the vector lanes: queries for the output and `dq`, keys for `dk` and `dv`. The
//! rows of the other kind come in tiles. A square of scratch holds one value a pair, `[other][own]`. Pairs
//! that the mask forbids may be computed, but no chain ever takes them.

use std::cell::RefCell;
use std::ops::Range;

use super::gemm_pack::Buffer;
use super::simd::{SimdPath, Start, Task, Tile, Transpose, dispatch};
use crate::op::attention::KEY_TILE;

/// The most rows of a block and of a tile; also the stride of a square.
pub(super) const TILE: usize = KEY_TILE;

/// Elements that plain code handles at a time: one vector of the widest path.
pub(super) const CHUNK: usize = 16;

/// What a thread keeps between blocks, so that it allocates only when a larger one comes.
#[derive(Default)]
pub(super) struct Scratch {
    pub lanes: [Buffer; 2],
    pub columns: [Buffer; 2],
    pub squares: [Buffer; 2],
    pub sums: [Buffer; 2],
}

/// Runs `work` with this thread's scratch.
pub(super) fn with_scratch<R>(work: impl FnOnce(&mut Scratch) -> R) -> R {
    thread_local! {
        static SCRATCH: RefCell<Scratch> = RefCell::default();
    }
    SCRATCH.with_borrow_mut(work)
}

/// Some columns of consecutive rows: element `[r, c]` is `data[r * stride + c]`.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub data: &'a [f32],
    pub stride: usize,
    pub count: usize,
    pub cols: usize,
}

impl<'a> Rows<'a> {
    /// The rows of `range`.
    pub fn part(&self, range: Range<usize>) -> Rows<'a> {
        Rows {
            data: &self.data[range.start * self.stride..],
            count: range.len(),
            ..*self
        }
    }
}

/// Which rows of the other kind an own row meets.
#[derive(Clone, Copy)]
pub(super) enum Side {
    /// An own query meets the keys up to itself.
    UpTo,
    /// An own key meets the queries from itself on.
    From,
}

/// A block of own rows and a tile of others, by their positions in the sequence.
#[derive(Clone, Copy)]
pub(super) struct Pairing {
    pub side: Side,
    pub own_first: usize,
    pub own: usize,
    pub other_first: usize,
    pub others: usize,
}

impl Pairing {
    /// The others of the tile that a row of the block meets.
    pub fn others_of(&self, own: usize) -> Range<usize> {
        let at = self.own_first + own;
        match self.side {
            Side::UpTo => 0..(at + 1).saturating_sub(self.other_first).min(self.others),
            Side::From => at.saturating_sub(self.other_first).min(self.others)..self.others,
        }
    }

    /// The rows of the block that an other of the tile meets.
    pub fn owns_of(&self, other: usize) -> Range<usize> {
        let at = self.other_first + other;
        match self.side {
            Side::UpTo => at.saturating_sub(self.own_first).min(self.own)..self.own,
            Side::From => 0..(at + 1).saturating_sub(self.own_first).min(self.own),
        }
    }

    /// [`Pairing::owns_of`] widened to whole chunks of the square.
    pub fn chunks_of(&self, other: usize) -> Range<usize> {
        let owns = self.owns_of(other);
        owns.start / CHUNK * CHUNK..owns.end.next_multiple_of(CHUNK)
    }

    /// Whether any of `others` meets any of `owns`.
    fn meet(&self, others: Range<usize>, owns: Range<usize>) -> bool {
        let (first, last) = (self.owns_of(others.start), self.owns_of(others.end - 1));
        let (start, end) = (first.start.min(last.start), first.end.max(last.end));
        start < owns.end && owns.start < end
    }
}

/// `count` rounded up to whole vectors of the path.
pub(super) fn padded(path: SimdPath, count: usize) -> usize {
    count.next_multiple_of(path.tile_shape().lanes)
}

/// Cuts [`padded`] columns into panels of at most two vectors: (first column, columns).
fn panels(path: SimdPath, count: usize) -> impl Iterator<Item = (usize, usize)> {
    let (full, end) = (2 * path.tile_shape().lanes, padded(path, count));
    (0..end)
        .step_by(full)
        .map(move |start| (start, full.min(end - start)))
}

/// Rows transposed to vector lanes: a panel holds, for each column, one element a row.
pub(super) struct Lanes<'a> {
    data: &'a [f32],
    count: usize,
    depth: usize,
}

impl<'a> Lanes<'a> {
    /// Packs `rows`; lanes without a row are zeros.
    pub fn pack(path: SimdPath, rows: Rows, buffer: &'a mut Buffer) -> Self {
        let data = buffer.floats(padded(path, rows.count) * rows.cols);
        for (start, width) in panels(path, rows.count) {
            let panel = &mut data[start * rows.cols..][..width * rows.cols];
            let count = width.min(rows.count - start);
            if count < width {
                panel.fill(0.0);
            }
            Transpose {
                src: &rows.data[start * rows.stride..],
                src_stride: rows.stride,
                dst: panel,
                dst_stride: width,
                rows: count,
                cols: rows.cols,
            }
            .run(path);
        }
        Lanes {
            data,
            count: rows.count,
            depth: rows.cols,
        }
    }

    /// `square[o, i] = others[o] · own[i]`, one fma chain over ascending columns, for the pairs that
    /// meet and some others.
    pub fn dots(&self, path: SimdPath, pairing: &Pairing, others: Rows, square: &mut [f32]) {
        let step = path.tile_shape().rows;
        for (start, width) in panels(path, self.count) {
            for row in (0..others.count).step_by(step) {
                let rows = step.min(others.count - row);
                if !pairing.meet(row..row + rows, start..start + width) {
                    continue;
                }
                Tile {
                    rows,
                    width,
                    k: self.depth,
                    a: &others.data[row * others.stride..],
                    a_row: others.stride,
                    a_step: 1,
                    b: &self.data[start * self.depth..],
                    c: &mut square[row * TILE + start..],
                    c_row: TILE,
                    start: Start::Zero,
                }
                .run(path);
            }
        }
    }
}

/// Rows copied to panels of columns: a panel holds, for each row, its columns of the panel.
pub(super) struct Columns<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
}

impl<'a> Columns<'a> {
    /// Packs `rows`; columns that do not exist are zeros.
    pub fn pack(path: SimdPath, rows: Rows, buffer: &'a mut Buffer) -> Self {
        let data = buffer.floats(padded(path, rows.cols) * rows.count);
        for (start, width) in panels(path, rows.cols) {
            let panel = &mut data[start * rows.count..][..width * rows.count];
            let cols = width.min(rows.cols - start);
            let sources = rows.data.chunks(rows.stride);
            for (to, from) in panel.chunks_exact_mut(width).zip(sources) {
                to[..cols].copy_from_slice(&from[start..start + cols]);
                to[cols..].fill(0.0);
            }
        }
        Columns {
            data,
            rows: rows.count,
            cols: rows.cols,
        }
    }
}

/// For every own row the chains over the others that it meets, ascending:
/// `sums[i, c] = fma(square[o, i], columns[o, c], sums[i, c])`.
pub(super) struct Chains<'a> {
    pub path: SimdPath,
    pub pairing: Pairing,
    pub square: &'a [f32],
    pub columns: Columns<'a>,
}

impl Chains<'_> {
    /// Continues the chains in `sums`, whose rows are [`padded`] columns apart.
    pub fn run(&self, sums: &mut [f32]) {
        let (step, stride) = (
            self.path.tile_shape().rows,
            padded(self.path, self.columns.cols),
        );
        for first in (0..self.pairing.own).step_by(step) {
            let rows = step.min(self.pairing.own - first);
            let spans = || (first..first + rows).map(|own| self.pairing.others_of(own));
            let start = spans().map(|s| s.start).max().unwrap_or(0);
            let end = spans().map(|s| s.end).min().unwrap_or(0);
            let group = &mut sums[first * stride..][..rows * stride];
            // What rows of the group meet alone lies before the common part or after it, never both.
            if spans().any(|s| s.start < start) {
                self.edge(first, group, |s| s.start..start);
            }
            if start < end {
                self.common(first, start..end, group);
            }
            if spans().any(|s| s.end > end) {
                self.edge(first, group, |s| end..s.end);
            }
        }
    }

    /// The others that all rows of the group from `first` on meet.
    fn common(&self, first: usize, others: Range<usize>, group: &mut [f32]) {
        let stride = padded(self.path, self.columns.cols);
        for (start, width) in panels(self.path, self.columns.cols) {
            let panel = &self.columns.data[start * self.columns.rows..];
            Tile {
                rows: group.len() / stride,
                width,
                k: others.len(),
                a: &self.square[others.start * TILE + first..],
                a_row: 1,
                a_step: TILE,
                b: &panel[others.start * width..],
                c: &mut group[start..],
                c_row: stride,
                start: Start::Resume,
            }
            .run(self.path);
        }
    }

    /// The others that only some rows of the group meet: `part` cuts them from a row's.
    fn edge(&self, first: usize, group: &mut [f32], part: impl Fn(Range<usize>) -> Range<usize>) {
        let stride = padded(self.path, self.columns.cols);
        dispatch(
            self.path,
            Edge {
                chains: self,
                first,
                stride,
                group,
                part,
            },
        );
    }
}

/// The chains of a group's rows over others of their own.
struct Edge<'a, F> {
    chains: &'a Chains<'a>,
    first: usize,
    stride: usize,
    group: &'a mut [f32],
    part: F,
}

impl<F: Fn(Range<usize>) -> Range<usize>> Task for Edge<'_, F> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let Chains {
            path,
            pairing,
            square,
            columns,
        } = self.chains;
        for (r, sums) in self.group.chunks_exact_mut(self.stride).enumerate() {
            let own = self.first + r;
            let others = (self.part)(pairing.others_of(own));
            for (start, width) in panels(*path, columns.cols) {
                let panel = &columns.data[start * columns.rows..];
                for other in others.clone() {
                    let weight = square[other * TILE + own];
                    let row = &panel[other * width..][..width];
                    for (sum, &x) in sums[start..][..width].iter_mut().zip(row) {
                        *sum = weight.mul_add(x, *sum);
                    }
                }
            }
        }
    }
}

/// Writes finished sums: `out[r, c] = sums[r, c] * factors[r]`.
pub(super) struct StoreRows<'a> {
    pub sums: &'a [f32],
    /// Floats from one row of the sums to the next.
    pub sums_stride: usize,
    pub factors: &'a [f32],
    /// The rows to write, from their first column on; one a factor.
    pub out: &'a mut [f32],
    pub out_stride: usize,
    pub cols: usize,
}

impl Task for StoreRows<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let sums = self.sums.chunks_exact(self.sums_stride);
        let rows = self.out.chunks_mut(self.out_stride).zip(sums);
        for ((out, sums), factor) in rows.zip(self.factors) {
            for (out, sum) in out[..self.cols].iter_mut().zip(sums) {
                *out = sum * factor;
            }
        }
    }
}

/// Rows of a block: [`TILE`], or fewer where the threads would not all have work.
pub(super) fn block_rows(threads: usize, sequences: usize, seq_len: usize) -> usize {
    let mut rows = TILE;
    while rows > CHUNK && sequences * seq_len.div_ceil(rows) < 2 * threads {
        rows /= 2;
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pairs (own, other) of a pairing by the mask's definition.
    fn meets(pairing: &Pairing, own: usize, other: usize) -> bool {
        let (own, other) = (pairing.own_first + own, pairing.other_first + other);
        match pairing.side {
            Side::UpTo => other <= own,
            Side::From => own <= other,
        }
    }

    fn pairings() -> impl Iterator<Item = Pairing> {
        let sides = [Side::UpTo, Side::From].into_iter();
        sides.flat_map(|side| {
            let firsts = (0..100).step_by(9);
            firsts.flat_map(move |own_first| {
                [(1, 64), (16, 5), (64, 64)].map(|(own, others)| Pairing {
                    side,
                    own_first,
                    own,
                    other_first: 37,
                    others,
                })
            })
        })
    }

    #[test]
    fn both_views_of_the_mask_are_its_definition() {
        for pairing in pairings() {
            for own in 0..pairing.own {
                for other in 0..pairing.others {
                    let expected = meets(&pairing, own, other);
                    assert_eq!(pairing.others_of(own).contains(&other), expected);
                    assert_eq!(pairing.owns_of(other).contains(&own), expected);
                    assert!(!expected || pairing.chunks_of(other).contains(&own));
                    let met = pairing.meet(other..other + 1, own..own + 1);
                    assert_eq!(met, expected);
                }
            }
        }
    }

    #[test]
    fn chains_take_the_pairs_that_meet_and_no_other() {
        let (cols, mut buffer) = (21, Buffer::default());
        for path in SimdPath::available() {
            for pairing in pairings() {
                let data: Vec<f32> = (0..pairing.others * cols).map(|i| i as f32).collect();
                let rows = Rows {
                    data: &data,
                    stride: cols,
                    count: pairing.others,
                    cols,
                };
                let mut square = vec![f32::NAN; TILE * TILE];
                for own in 0..pairing.own {
                    for other in (0..pairing.others).filter(|&o| meets(&pairing, own, o)) {
                        square[other * TILE + own] = 1.0;
                    }
                }
                let stride = padded(path, cols);
                let mut sums = vec![0.0; pairing.own * stride];
                let chains = Chains {
                    path,
                    pairing,
                    square: &square,
                    columns: Columns::pack(path, rows, &mut buffer),
                };
                chains.run(&mut sums);
                for (own, sums) in sums.chunks_exact(stride).enumerate() {
                    let met = (0..pairing.others).filter(|&o| meets(&pairing, own, o));
                    // Sums of whole numbers below 2^24 are exact.
                    let expected: usize = met.map(|other| other * cols + 20).sum();
                    assert_eq!(sums[20], expected as f32, "{path}, own {own}");
                }
            }
        }
    }

    #[test]
    fn blocks_are_shorter_only_where_threads_would_be_idle() {
        assert_eq!(block_rows(2, 32, 32), 64);
        assert_eq!(block_rows(2, 1, 1024), 64);
        assert_eq!(block_rows(2, 1, 128), 32);
        assert_eq!(block_rows(8, 1, 1), 16);
    }
}
