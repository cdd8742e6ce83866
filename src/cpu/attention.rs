//! Causal attention on the CPU: the forward pass and the dot products of its backward.
//!
//! Work is cut into blocks of token rows, each of one sequence. Within a block the queries are the
//! vector lanes of scores and softmax, and the columns of a head are those of the output's chains.

use std::ops::Range;

use rayon::prelude::*;

use super::arena::Operands;
use super::attention_block::{
    CHUNK, Chains, Columns, Lanes, Pairing, Rows, Scratch, Side, StoreRows, TILE, block_rows,
    padded, with_scratch,
};
pub use super::attention_grad::{grad_key_value, grad_query};
use super::attention_tensor;
use super::context::CpuContext;
use super::rows::expect_len;
use super::simd::{SimdPath, Task, dispatch};
use crate::error::DeviceError;
use crate::num;
use crate::num::lanes::lane_dot;
use crate::num::tensor_step::Kind;
use crate::op::attention::{Attention, AttentionDelta, AttentionShape, score_scale};

/// Checks that heads can be told apart in a row and that query heads share key heads evenly.
pub(super) fn expect_heads(shape: &AttentionShape) -> Result<(), DeviceError> {
    let heads = &shape.heads;
    expect_len(
        "heads: n_kv_heads",
        heads.n_kv_heads.max(1),
        heads.n_kv_heads,
    )?;
    let even = heads.n_heads.next_multiple_of(heads.n_kv_heads).max(1);
    expect_len("heads: n_heads", even, heads.n_heads)?;
    expect_len("heads: head_dim", heads.head_dim.max(1), heads.head_dim)
}

/// A block of rows of one sequence.
pub(super) struct Block {
    /// The first token of the sequence.
    pub sequence: usize,
    /// The rows of the block, counted within the sequence.
    pub rows: Range<usize>,
}

impl Block {
    /// The blocks of all sequences, in the order of their rows.
    pub fn all(context: &CpuContext, shape: &AttentionShape) -> Vec<Block> {
        let seq_len = shape.seq_len;
        let step = block_rows(context.threads(), shape.batch, seq_len);
        let starts = |b: usize| (0..seq_len).step_by(step).map(move |start| (b, start));
        (0..shape.batch)
            .flat_map(starts)
            .map(|(b, start)| Block {
                sequence: b * seq_len,
                rows: start..(start + step).min(seq_len),
            })
            .collect()
    }
}

/// The rows of one sequence of a matrix with `stride` columns, cut to one head's columns.
pub(super) fn head_rows<'a>(
    matrix: &'a [f32],
    shape: &AttentionShape,
    sequence: usize,
    (stride, head): (usize, usize),
) -> Rows<'a> {
    let cols = shape.heads.head_dim;
    Rows {
        data: &matrix[sequence * stride + head * cols..],
        stride,
        count: shape.seq_len,
        cols,
    }
}

/// How many rows each block has.
pub(super) fn row_counts(blocks: &[Block]) -> Vec<usize> {
    blocks.iter().map(|block| block.rows.len()).collect()
}

/// Cuts a matrix of `stride` columns into parts of these many rows each.
pub(super) fn cut<'a>(
    mut rest: &'a mut [f32],
    stride: usize,
    counts: &[usize],
) -> Vec<&'a mut [f32]> {
    let mut parts = Vec::with_capacity(counts.len());
    for count in counts {
        let (part, tail) = rest.split_at_mut(count * stride);
        parts.push(part);
        rest = tail;
    }
    parts
}

/// The output and the log of each row's sum of exponentials.
///
/// # Errors
/// [`DeviceError::OperandSize`] when the operands do not fit the op; nothing is written then.
pub fn forward(
    context: &CpuContext,
    op: &Attention,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let shape = &op.shape;
    let (rows, heads) = (shape.rows(), shape.heads);
    let qkv: &[f32] = operands.read(0)?;
    let o: &mut [f32] = operands.write(0)?;
    let lse: &mut [f32] = operands.write(1)?;
    expect_heads(shape)?;
    expect_len("qkv", rows * heads.columns(), qkv.len())?;
    expect_len("o", rows * heads.query_columns(), o.len())?;
    expect_len("lse", rows * heads.n_heads, lse.len())?;
    if let Some(kind) = Kind::of(op.math) {
        attention_tensor::forward(context, (kind, shape), qkv, (o, lse));
        return Ok(());
    }
    let blocks = Block::all(context, shape);
    let counts = row_counts(&blocks);
    let outputs = cut(o, heads.query_columns(), &counts);
    let logs = cut(lse, heads.n_heads, &counts);
    let path = context.path();
    context.run(|| {
        let parts = blocks.par_iter().zip(outputs).zip(logs).with_max_len(1);
        parts.for_each(|((block, o), lse)| {
            with_scratch(|scratch| {
                for head in 0..heads.n_heads {
                    let queries = QueryBlock {
                        path,
                        shape,
                        block,
                        qkv,
                        head,
                    };
                    queries.attend(scratch, o, lse);
                }
            });
        });
    });
    Ok(())
}

/// One query head of a block of queries.
struct QueryBlock<'a> {
    path: SimdPath,
    shape: &'a AttentionShape,
    block: &'a Block,
    qkv: &'a [f32],
    head: usize,
}

impl QueryBlock<'_> {
    fn rows(&self, head: usize) -> Rows<'_> {
        let columns = self.shape.heads.columns();
        head_rows(self.qkv, self.shape, self.block.sequence, (columns, head))
    }

    /// Computes the head's columns of the block's rows of `o` and its column of `lse`.
    fn attend(&self, scratch: &mut Scratch, o: &mut [f32], lse: &mut [f32]) {
        let (path, heads, own) = (self.path, &self.shape.heads, &self.block.rows);
        let key_head = heads.n_heads + self.head / heads.group();
        let (keys, values) = (self.rows(key_head), self.rows(key_head + heads.n_kv_heads));
        let [lanes, _] = &mut scratch.lanes;
        let queries = Lanes::pack(path, self.rows(self.head).part(own.clone()), lanes);
        let stride = padded(path, heads.head_dim);
        let square = scratch.squares[0].floats(TILE * TILE);
        let sums = scratch.sums[0].floats(own.len() * stride);
        sums.fill(0.0);
        let mut softmax = Softmax::new(score_scale(heads.head_dim));
        for first in (0..own.end).step_by(TILE) {
            let tile = first..(first + TILE).min(own.end);
            let pairing = Pairing {
                side: Side::UpTo,
                own_first: own.start,
                own: own.len(),
                other_first: first,
                others: tile.len(),
            };
            queries.dots(path, &pairing, keys.part(tile.clone()), square);
            dispatch(
                path,
                SoftmaxTile {
                    softmax: &mut softmax,
                    pairing: &pairing,
                    square,
                    sums,
                    stride,
                },
            );
            let columns = Columns::pack(path, values.part(tile), &mut scratch.columns[0]);
            Chains {
                path,
                pairing,
                square,
                columns,
            }
            .run(sums);
        }
        dispatch(
            path,
            StoreRows {
                sums,
                sums_stride: stride,
                factors: &softmax.sum.map(|l| 1.0 / l)[..own.len()],
                out: &mut o[self.head * heads.head_dim..],
                out_stride: heads.query_columns(),
                cols: heads.head_dim,
            },
        );
        let logs = lse[self.head..].iter_mut().step_by(heads.n_heads);
        for (log, (max, sum)) in logs.zip(softmax.max.iter().zip(&softmax.sum)) {
            *log = max + num::log(*sum);
        }
    }
}

/// The online softmax of a block's queries.
struct Softmax {
    scale: f32,
    max: [f32; TILE],
    sum: [f32; TILE],
}

impl Softmax {
    fn new(scale: f32) -> Self {
        Softmax {
            scale,
            max: [f32::NEG_INFINITY; TILE],
            sum: [0.0; TILE],
        }
    }
}

/// Takes one tile of keys into the softmax: the square's dot products become probabilities relative
/// to the new maximum, and the sums are rescaled to it.
struct SoftmaxTile<'a> {
    softmax: &'a mut Softmax,
    pairing: &'a Pairing,
    square: &'a mut [f32],
    sums: &'a mut [f32],
    stride: usize,
}

impl Task for SoftmaxTile<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let Pairing { own, others, .. } = *self.pairing;
        let (maxima, _) = self.softmax.max.as_chunks_mut::<CHUNK>();
        let (totals, _) = self.softmax.sum.as_chunks_mut::<CHUNK>();
        let mut factors = [0.0; TILE];
        let (factor_chunks, _) = factors.as_chunks_mut::<CHUNK>();
        let (squares, _) = self.square.as_chunks_mut::<CHUNK>();
        let chunks = maxima.iter_mut().zip(totals).zip(factor_chunks);
        for (c, ((max, total), factor)) in chunks.enumerate().take(own.div_ceil(CHUNK)) {
            let first = self.pairing.own_first + c * CHUNK;
            let hidden_from = |other: usize| {
                // Lanes below this do not see the key.
                (self.pairing.other_first + other)
                    .saturating_sub(first)
                    .min(CHUNK) as u32
            };
            let mut top = *max;
            for other in 0..others {
                let scores = &mut squares[other * (TILE / CHUNK) + c];
                let hidden = hidden_from(other);
                for l in 0..CHUNK {
                    let score = scores[l] * self.softmax.scale;
                    scores[l] = score;
                    let greater = (l as u32 >= hidden) & (score > top[l]);
                    top[l] = if greater { score } else { top[l] };
                }
            }
            let mut sum = *total;
            for l in 0..CHUNK {
                factor[l] = num::exp(max[l] - top[l]);
                sum[l] *= factor[l];
            }
            for other in 0..others {
                let scores = &mut squares[other * (TILE / CHUNK) + c];
                let hidden = hidden_from(other);
                for l in 0..CHUNK {
                    let p = num::exp(scores[l] - top[l]);
                    scores[l] = p;
                    sum[l] = if l as u32 >= hidden {
                        sum[l] + p
                    } else {
                        sum[l]
                    };
                }
            }
            (*max, *total) = (top, sum);
        }
        for (sums, factor) in self.sums.chunks_exact_mut(self.stride).zip(&factors) {
            for sum in sums {
                *sum *= factor;
            }
        }
    }
}

/// Rows a task of [`delta`] takes.
const DELTA_ROWS: usize = 64;

/// The dot products of the output with its gradient.
///
/// # Errors
/// [`DeviceError::OperandSize`] when the operands do not fit the op; nothing is written then.
pub fn delta(
    context: &CpuContext,
    op: &AttentionDelta,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let (rows, heads) = (op.shape.rows(), op.shape.heads);
    let dout: &[f32] = operands.read(0)?;
    let o: &[f32] = operands.read(1)?;
    let delta: &mut [f32] = operands.write(0)?;
    expect_heads(&op.shape)?;
    expect_len("dout", rows * heads.query_columns(), dout.len())?;
    expect_len("o", rows * heads.query_columns(), o.len())?;
    expect_len("delta", rows * heads.n_heads, delta.len())?;
    let (path, step) = (context.path(), DELTA_ROWS * heads.n_heads);
    context.run(|| {
        let inputs = dout
            .par_chunks(step * heads.head_dim)
            .zip(o.par_chunks(step * heads.head_dim));
        let parts = delta.par_chunks_mut(step).zip(inputs);
        parts.for_each(|(delta, (dout, o))| {
            let head_dim = heads.head_dim;
            dispatch(
                path,
                Delta {
                    delta,
                    dout,
                    o,
                    head_dim,
                },
            );
        });
    });
    Ok(())
}

struct Delta<'a> {
    delta: &'a mut [f32],
    dout: &'a [f32],
    o: &'a [f32],
    head_dim: usize,
}

impl Task for Delta<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let dout = self.dout.chunks_exact(self.head_dim);
        let heads = dout.zip(self.o.chunks_exact(self.head_dim));
        for (delta, (dout, o)) in self.delta.iter_mut().zip(heads) {
            *delta = lane_dot(dout, o);
        }
    }
}
