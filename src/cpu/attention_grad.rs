//! The backward passes of causal attention on the CPU.
//!
//! The query pass holds queries as lanes and walks over tiles of keys; the key and value pass holds keys
//! as lanes and walks over tiles of queries. Both compute the probabilities again from `lse`.

use std::ops::Range;

use rayon::prelude::*;

use super::arena::Operands;
use super::attention::{Block, cut, expect_heads, head_rows, row_counts};
use super::attention_block::{
    CHUNK, Chains, Columns, Lanes, Pairing, Rows, Scratch, Side, StoreRows, TILE, padded,
    with_scratch,
};
use super::attention_tensor;
use super::context::CpuContext;
use super::gemm_pack::Buffer;
use super::rows::expect_len;
use super::simd::{SimdPath, Task, dispatch};
use crate::error::DeviceError;
use crate::num;
use crate::num::tensor_step::Kind;
use crate::op::attention::{
    AttentionGradKeyValue, AttentionGradQuery, AttentionShape, score_scale,
};

/// The query columns of `dqkv`.
///
/// # Errors
/// [`DeviceError::OperandSize`] when the operands do not fit the op; nothing is written then.
pub fn grad_query(
    context: &CpuContext,
    op: &AttentionGradQuery,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let (inputs, dqkv) = Inputs::take(&op.shape, operands)?;
    if let Some(kind) = Kind::of(op.math) {
        let wanted = attention_tensor::Columns::Query;
        attention_tensor::grad(context, (kind, wanted), inputs, dqkv);
        return Ok(());
    }
    inputs.each_block(context, dqkv, |pass, scratch, rows| {
        for head in 0..op.shape.heads.n_heads {
            pass.queries(head, scratch, rows);
        }
    });
    Ok(())
}

/// The key and value columns of `dqkv`.
///
/// # Errors
/// [`DeviceError::OperandSize`] when the operands do not fit the op; nothing is written then.
pub fn grad_key_value(
    context: &CpuContext,
    op: &AttentionGradKeyValue,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let (inputs, dqkv) = Inputs::take(&op.shape, operands)?;
    if let Some(kind) = Kind::of(op.math) {
        let wanted = attention_tensor::Columns::KeyValue;
        attention_tensor::grad(context, (kind, wanted), inputs, dqkv);
        return Ok(());
    }
    inputs.each_block(context, dqkv, |pass, scratch, rows| {
        for kv_head in 0..op.shape.heads.n_kv_heads {
            pass.keys(kv_head, scratch, rows);
        }
    });
    Ok(())
}

/// What both passes read.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    pub shape: &'a AttentionShape,
    pub qkv: &'a [f32],
    pub dout: &'a [f32],
    pub lse: &'a [f32],
    pub delta: &'a [f32],
}

impl<'a> Inputs<'a> {
    /// The operands of a call, their sizes checked.
    fn take<'o: 'a>(
        shape: &'a AttentionShape,
        operands: &mut Operands<'o>,
    ) -> Result<(Self, &'o mut [f32]), DeviceError> {
        let inputs = Inputs {
            shape,
            qkv: operands.read(0)?,
            dout: operands.read(1)?,
            lse: operands.read(2)?,
            delta: operands.read(3)?,
        };
        let dqkv: &mut [f32] = operands.write(0)?;
        let (rows, heads) = (shape.rows(), shape.heads);
        expect_heads(shape)?;
        expect_len("qkv", rows * heads.columns(), inputs.qkv.len())?;
        expect_len("dout", rows * heads.query_columns(), inputs.dout.len())?;
        expect_len("lse", rows * heads.n_heads, inputs.lse.len())?;
        expect_len("delta", rows * heads.n_heads, inputs.delta.len())?;
        expect_len("dqkv", rows * heads.columns(), dqkv.len())?;
        Ok((inputs, dqkv))
    }

    /// Runs `work` for every block with the block's rows of `dqkv`.
    fn each_block(
        self,
        context: &CpuContext,
        dqkv: &mut [f32],
        work: impl Fn(Pass, &mut Scratch, &mut [f32]) + Sync,
    ) {
        let blocks = Block::all(context, self.shape);
        let parts = cut(dqkv, self.shape.heads.columns(), &row_counts(&blocks));
        let path = context.path();
        context.run(|| {
            let parts = blocks.par_iter().zip(parts).with_max_len(1);
            parts.for_each(|(block, rows)| {
                let pass = Pass {
                    path,
                    inputs: self,
                    block,
                };
                with_scratch(|scratch| work(pass, scratch, rows));
            });
        });
    }
}

/// One block of a pass.
struct Pass<'a> {
    path: SimdPath,
    inputs: Inputs<'a>,
    block: &'a Block,
}

impl Pass<'_> {
    /// A head of the sequence's rows of `qkv`.
    fn qkv(&self, head: usize) -> Rows<'_> {
        let (shape, columns) = (self.inputs.shape, self.inputs.shape.heads.columns());
        head_rows(self.inputs.qkv, shape, self.block.sequence, (columns, head))
    }

    /// A query head of the sequence's rows of `dout`.
    fn dout(&self, head: usize) -> Rows<'_> {
        let shape = self.inputs.shape;
        let columns = shape.heads.query_columns();
        head_rows(
            self.inputs.dout,
            shape,
            self.block.sequence,
            (columns, head),
        )
    }

    /// A head of up to [`TILE`] rows of a matrix with one value a token and head.
    fn statistics(&self, matrix: &[f32], head: usize, rows: Range<usize>) -> [f32; TILE] {
        let n_heads = self.inputs.shape.heads.n_heads;
        let mut values = [0.0; TILE];
        let first = self.block.sequence + rows.start;
        let column = matrix[first * n_heads + head..].iter().step_by(n_heads);
        for (value, x) in values.iter_mut().zip(column.take(rows.len())) {
            *value = *x;
        }
        values
    }

    /// `lse` and `delta` of a head.
    fn row_values(&self, head: usize, rows: Range<usize>) -> [[f32; TILE]; 2] {
        [
            self.statistics(self.inputs.lse, head, rows.clone()),
            self.statistics(self.inputs.delta, head, rows),
        ]
    }

    /// `dq` of one query head.
    fn queries(&self, head: usize, scratch: &mut Scratch, out: &mut [f32]) {
        let (path, heads, own) = (self.path, &self.inputs.shape.heads, &self.block.rows);
        let key_head = heads.n_heads + head / heads.group();
        let (keys, values) = (self.qkv(key_head), self.qkv(key_head + heads.n_kv_heads));
        let [first_lanes, second_lanes] = &mut scratch.lanes;
        let queries = Lanes::pack(path, self.qkv(head).part(own.clone()), first_lanes);
        let douts = Lanes::pack(path, self.dout(head).part(own.clone()), second_lanes);
        let [lse, delta] = self.row_values(head, own.clone());
        let stride = padded(path, heads.head_dim);
        let [p, ds] = scratch.squares.each_mut().map(|s| s.floats(TILE * TILE));
        let sums = scratch.sums[0].floats(own.len() * stride);
        sums.fill(0.0);
        let scale = score_scale(heads.head_dim);
        for first in (0..own.end).step_by(TILE) {
            let tile = first..(first + TILE).min(own.end);
            let pairing = Pairing {
                side: Side::UpTo,
                own_first: own.start,
                own: own.len(),
                other_first: first,
                others: tile.len(),
            };
            queries.dots(path, &pairing, keys.part(tile.clone()), p);
            douts.dots(path, &pairing, values.part(tile.clone()), ds);
            let by_lane = ByLane {
                pairing: &pairing,
                scale,
                lse: &lse,
                delta: &delta,
                p,
                ds,
            };
            dispatch(path, by_lane);
            let columns = Columns::pack(path, keys.part(tile), &mut scratch.columns[0]);
            let chains = Chains {
                path,
                pairing,
                square: ds,
                columns,
            };
            chains.run(sums);
        }
        self.store(sums, scale, head, out);
    }

    /// `dk` and `dv` of one key head.
    fn keys(&self, kv_head: usize, scratch: &mut Scratch, out: &mut [f32]) {
        let (path, shape, own) = (self.path, self.inputs.shape, &self.block.rows);
        let heads = &shape.heads;
        let key_head = heads.n_heads + kv_head;
        let value_head = key_head + heads.n_kv_heads;
        let [first_lanes, second_lanes] = &mut scratch.lanes;
        let keys = Lanes::pack(path, self.qkv(key_head).part(own.clone()), first_lanes);
        let values = Lanes::pack(path, self.qkv(value_head).part(own.clone()), second_lanes);
        let len = own.len() * padded(path, heads.head_dim);
        let [dk, dv] = scratch.sums.each_mut().map(|s| s.floats(len));
        dk.fill(0.0);
        dv.fill(0.0);
        for head in kv_head * heads.group()..(kv_head + 1) * heads.group() {
            for first in (own.start..shape.seq_len).step_by(TILE) {
                let tile = first..(first + TILE).min(shape.seq_len);
                let step = KeyStep {
                    pass: self,
                    head,
                    tile,
                    keys: &keys,
                    values: &values,
                };
                step.run(&mut scratch.squares, &mut scratch.columns, [dk, dv]);
            }
        }
        self.store(dk, score_scale(heads.head_dim), key_head, out);
        self.store(dv, 1.0, value_head, out);
    }

    /// Writes finished sums times `factor` to a head of the block's rows of `dqkv`.
    fn store(&self, sums: &[f32], factor: f32, head: usize, out: &mut [f32]) {
        let heads = &self.inputs.shape.heads;
        dispatch(
            self.path,
            StoreRows {
                sums,
                sums_stride: padded(self.path, heads.head_dim),
                factors: &[factor; TILE][..self.block.rows.len()],
                out: &mut out[head * heads.head_dim..],
                out_stride: heads.columns(),
                cols: heads.head_dim,
            },
        );
    }
}

/// A tile of queries of one head, taken into the sums of a block of keys.
struct KeyStep<'a> {
    pass: &'a Pass<'a>,
    head: usize,
    tile: Range<usize>,
    keys: &'a Lanes<'a>,
    values: &'a Lanes<'a>,
}

impl KeyStep<'_> {
    fn run(self, squares: &mut [Buffer; 2], columns: &mut [Buffer; 2], [dk, dv]: [&mut [f32]; 2]) {
        let (pass, path, own) = (self.pass, self.pass.path, &self.pass.block.rows);
        let queries = pass.qkv(self.head).part(self.tile.clone());
        let douts = pass.dout(self.head).part(self.tile.clone());
        let [lse, delta] = pass.row_values(self.head, self.tile.clone());
        let [p, ds] = squares.each_mut().map(|s| s.floats(TILE * TILE));
        let pairing = Pairing {
            side: Side::From,
            own_first: own.start,
            own: own.len(),
            other_first: self.tile.start,
            others: self.tile.len(),
        };
        self.keys.dots(path, &pairing, queries, p);
        self.values.dots(path, &pairing, douts, ds);
        let by_row = ByRow {
            pairing: &pairing,
            scale: score_scale(pass.inputs.shape.heads.head_dim),
            lse: &lse,
            delta: &delta,
            p,
            ds,
        };
        dispatch(path, by_row);
        for ((square, rows), (buffer, sums)) in [(&*p, douts), (&*ds, queries)]
            .into_iter()
            .zip(columns.iter_mut().zip([dv, dk]))
        {
            let chains = Chains {
                path,
                pairing,
                square,
                columns: Columns::pack(path, rows, buffer),
            };
            chains.run(sums);
        }
    }
}

/// `p = exp(p · scale - lse)` and `ds = p · (ds - delta)`, where `p` holds dot products of queries and
/// keys, `ds` those of `dout` and values, and the queries are lanes.
struct ByLane<'a> {
    pairing: &'a Pairing,
    scale: f32,
    lse: &'a [f32; TILE],
    delta: &'a [f32; TILE],
    p: &'a [f32],
    ds: &'a mut [f32],
}

impl Task for ByLane<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let rows = self
            .p
            .chunks_exact(TILE)
            .zip(self.ds.chunks_exact_mut(TILE));
        for (other, (p, ds)) in rows.enumerate().take(self.pairing.others) {
            let lanes = self.pairing.chunks_of(other);
            let (p, _) = p[lanes.clone()].as_chunks::<CHUNK>();
            let (ds, _) = ds[lanes.clone()].as_chunks_mut::<CHUNK>();
            let (lse, _) = self.lse[lanes.clone()].as_chunks::<CHUNK>();
            let (delta, _) = self.delta[lanes].as_chunks::<CHUNK>();
            for ((p, ds), (lse, delta)) in p.iter().zip(ds).zip(lse.iter().zip(delta)) {
                for l in 0..CHUNK {
                    let p = num::exp(p[l] * self.scale - lse[l]);
                    ds[l] = p * (ds[l] - delta[l]);
                }
            }
        }
    }
}

/// As [`ByLane`], where the keys are lanes; `p` is kept as well.
struct ByRow<'a> {
    pairing: &'a Pairing,
    scale: f32,
    lse: &'a [f32; TILE],
    delta: &'a [f32; TILE],
    p: &'a mut [f32],
    ds: &'a mut [f32],
}

impl Task for ByRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let rows = self
            .p
            .chunks_exact_mut(TILE)
            .zip(self.ds.chunks_exact_mut(TILE));
        let values = self.lse.iter().zip(self.delta);
        let all = rows.zip(values).enumerate().take(self.pairing.others);
        for (other, ((p, ds), (lse, delta))) in all {
            let lanes = self.pairing.chunks_of(other);
            let (p, _) = p[lanes.clone()].as_chunks_mut::<CHUNK>();
            let (ds, _) = ds[lanes].as_chunks_mut::<CHUNK>();
            for (p, ds) in p.iter_mut().zip(ds) {
                // On copies, so that no store stands between the lanes of a vector.
                let (mut exps, mut grads) = (*p, *ds);
                for l in 0..CHUNK {
                    exps[l] = num::exp(exps[l] * self.scale - lse);
                    grads[l] = exps[l] * (grads[l] - delta);
                }
                (*p, *ds) = (exps, grads);
            }
        }
    }
}
