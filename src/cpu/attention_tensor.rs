//! Causal attention of the tensor-core domains on the CPU, forward and backward.
//!
//! Scores, sums and the softmax are binary32; every product is a chain of tensor-core steps over operands
//! that are rounded as they are read. Blocks and tiles are [`KEY_TILE`] rows from multiples of it on, so no
//! step reaches over the end of one. The pairs of a tile that the mask forbids are part of its chains as
//! zeros: a step that adds zeros alone leaves every sum but a negative zero as it is, and no sum is one.
//! What stands for `lse` is [`softmax::row_statistic`].

use rayon::prelude::*;

use super::attention::cut;
use super::attention_grad::Inputs;
use super::context::CpuContext;
use super::gemm::{Form, MatMut};
use super::simd::{SimdPath, Task, dispatch};
use super::tensor_gemm::{Elements, TensorGemm, TensorMat, TensorSum, tensor_gemm_alone};
use crate::num::softmax::{self, NO_REFERENCE, score_factor, score_weight};
use crate::num::tensor_step::Kind;
use crate::op::Store;
use crate::op::attention::{AttentionShape, KEY_TILE, score_scale};

/// Rows of a block and of a tile, and the stride of a square of pairs.
const TILE: usize = KEY_TILE;

/// Sums that a row's probabilities are added to: of every eight keys each takes two that are neighbours,
/// as the lanes of a tensor core hold them.
const SUMS: usize = 4;

/// The sum of a row from its [`SUMS`].
fn folded([a, b, c, d]: [f32; SUMS]) -> f32 {
    (a + b) + (c + d)
}

/// The columns of one head in some rows of a matrix.
#[derive(Clone, Copy)]
struct HeadRows<'a> {
    data: &'a [f32],
    stride: usize,
    rows: usize,
    head_dim: usize,
}

impl<'a> HeadRows<'a> {
    fn mat(self) -> TensorMat<'a> {
        TensorMat {
            elements: Elements::F32(self.data),
            rows: self.rows,
            cols: self.head_dim,
            stride: self.stride,
        }
    }
}

/// A square of one value a pair of the block's queries and the tile's keys, `[query][key]`.
struct Square {
    data: Vec<f32>,
    rows: usize,
    cols: usize,
}

impl Square {
    fn new() -> Self {
        Square {
            data: vec![0.0; TILE * TILE],
            rows: 0,
            cols: 0,
        }
    }

    fn mat(&self) -> TensorMat<'_> {
        TensorMat {
            elements: Elements::F32(&self.data),
            rows: self.rows,
            cols: self.cols,
            stride: TILE,
        }
    }
}

/// One call's sizes and how it computes.
#[derive(Clone, Copy)]
struct Pass<'a> {
    path: SimdPath,
    kind: Kind,
    shape: &'a AttentionShape,
}

impl Pass<'_> {
    /// `rows` of a head, from token `first` on, of a matrix of `stride` columns.
    fn head<'m>(
        &self,
        matrix: &'m [f32],
        (stride, head): (usize, usize),
        (first, rows): (usize, usize),
    ) -> HeadRows<'m> {
        let head_dim = self.shape.heads.head_dim;
        HeadRows {
            data: &matrix[first * stride + head * head_dim..],
            stride,
            rows,
            head_dim,
        }
    }

    /// `square = queries · keysᵀ`, each a chain over the head from what `sum` says.
    fn dots(&self, (queries, keys): (HeadRows, HeadRows), sum: TensorSum, square: &mut Square) {
        (square.rows, square.cols) = (queries.rows, keys.rows);
        let product = self.product(Form::Nt, queries.mat(), keys.mat(), sum);
        let result = MatMut {
            data: &mut square.data,
            rows: queries.rows,
            cols: keys.rows,
            stride: TILE,
        };
        tensor_gemm_alone(self.path, &product, result);
    }

    /// Goes on with the chains in `sums`: over the keys for [`Form::Nn`], over the queries for
    /// [`Form::Tn`].
    fn add(&self, form: Form, square: &Square, rows: HeadRows, sums: &mut [f32]) {
        let product = self.product(form, square.mat(), rows.mat(), TensorSum::Continue);
        let result = MatMut {
            data: sums,
            rows: product.m(),
            cols: rows.head_dim,
            stride: rows.head_dim,
        };
        tensor_gemm_alone(self.path, &product, result);
    }

    fn product<'m>(
        &self,
        form: Form,
        a: TensorMat<'m>,
        b: TensorMat<'m>,
        sum: TensorSum,
    ) -> TensorGemm<'m> {
        TensorGemm {
            kind: self.kind,
            form,
            a,
            b,
            bias: None,
            sum,
            store: Store::Assign,
        }
    }
}

/// The blocks of all sequences: first token, first position in the sequence, rows.
fn blocks(shape: &AttentionShape) -> Vec<[usize; 3]> {
    let seq_len = shape.seq_len;
    let starts = |b: usize| (0..seq_len).step_by(TILE).map(move |at| (b, at));
    (0..shape.batch)
        .flat_map(starts)
        .map(|(b, at)| [b * seq_len, at, TILE.min(seq_len - at)])
        .collect()
}

/// The output and each row's statistic, as [`super::attention::forward`], whose operands these are.
pub(super) fn forward(
    context: &CpuContext,
    (kind, shape): (Kind, &AttentionShape),
    qkv: &[f32],
    (o, lse): (&mut [f32], &mut [f32]),
) {
    let heads = shape.heads;
    let blocks = blocks(shape);
    let lengths: Vec<usize> = blocks.iter().map(|b| b[2]).collect();
    let outputs = cut(o, heads.query_columns(), &lengths);
    let logs = cut(lse, heads.n_heads, &lengths);
    let pass = Pass {
        path: context.path(),
        kind,
        shape,
    };
    context.run(|| {
        let parts = blocks.par_iter().zip(outputs).zip(logs).with_max_len(1);
        parts.for_each(|((&block, o), lse)| {
            for head in 0..heads.n_heads {
                attend(&pass, (block, head), qkv, (&mut *o, &mut *lse));
            }
        });
    });
}

/// One query head of a block of queries.
fn attend(
    pass: &Pass,
    ([sequence, start, rows], head): ([usize; 3], usize),
    qkv: &[f32],
    (o, lse): (&mut [f32], &mut [f32]),
) {
    let heads = &pass.shape.heads;
    let (columns, d) = (heads.columns(), heads.head_dim);
    let key_head = heads.n_heads + head / heads.group();
    let value_head = key_head + heads.n_kv_heads;
    let queries = pass.head(qkv, (columns, head), (sequence + start, rows));
    let mut square = Square::new();
    let mut sums = vec![0.0; rows * d];
    let (mut references, mut totals) = ([NO_REFERENCE; TILE], [[0.0_f32; SUMS]; TILE]);
    for first in (0..start + rows).step_by(TILE) {
        let tile = (sequence + first, TILE.min(pass.shape.seq_len - first));
        let keys = pass.head(qkv, (columns, key_head), tile);
        pass.dots((queries, keys), TensorSum::Chain, &mut square);
        for row in 0..rows {
            let visible = (start + row + 1 - first).min(tile.1);
            let softmax = SoftmaxRow {
                scores: &mut square.data[row * TILE..][..tile.1],
                visible,
                factor: score_factor(d),
                reference: &mut references[row],
                totals: &mut totals[row],
                sums: &mut sums[row * d..][..d],
            };
            dispatch(pass.path, softmax);
        }
        let values = pass.head(qkv, (columns, value_head), tile);
        pass.add(Form::Nn, &square, values, &mut sums);
    }
    for row in 0..rows {
        let total = folded(totals[row]);
        let factor = 1.0 / total;
        let out = &mut o[row * heads.query_columns() + head * d..][..d];
        for (out, sum) in out.iter_mut().zip(&sums[row * d..]) {
            *out = sum * factor;
        }
        lse[row * heads.n_heads + head] = softmax::row_statistic(references[row], total);
    }
}

/// Takes a tile of keys into the softmax of one query: the first `visible` dot products become weights beside
/// the row's reference, the others zeros; if the reference has to rise, the sums are rescaled before.
struct SoftmaxRow<'a> {
    scores: &'a mut [f32],
    visible: usize,
    factor: f32,
    reference: &'a mut f32,
    totals: &'a mut [f32; SUMS],
    sums: &'a mut [f32],
}

impl Task for SoftmaxRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let (scores, hidden) = self.scores.split_at_mut(self.visible);
        hidden.fill(0.0);
        let (mut top, mut nans) = (f32::NEG_INFINITY, 0.0_f32);
        for score in scores.iter() {
            top = if *score > top { *score } else { top };
            nans = if score.is_nan() { f32::NAN } else { nans };
        }
        let totals = self.totals;
        if let Some(rescale) = softmax::raise(self.reference, top + nans, self.factor) {
            for sum in totals.iter_mut().chain(self.sums.iter_mut()) {
                *sum = sum.mul_add(rescale.factor, rescale.addend);
            }
        }
        for score in scores.iter_mut() {
            *score = score_weight(*score, self.factor, *self.reference);
        }
        for eight in scores.chunks(2 * SUMS) {
            for (index, p) in eight.iter().enumerate() {
                totals[index / 2] += p;
            }
        }
    }
}

/// Which columns of `dqkv` a pass writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Columns {
    Query,
    KeyValue,
}

/// The query columns of `dqkv`, or its key and value columns.
pub(super) fn grad(
    context: &CpuContext,
    (kind, wanted): (Kind, Columns),
    inputs: Inputs,
    dqkv: &mut [f32],
) {
    let (shape, heads) = (inputs.shape, inputs.shape.heads);
    let pass = Pass {
        path: context.path(),
        kind,
        shape,
    };
    let gradients = Gradients { pass, inputs };
    let blocks = blocks(shape);
    let lengths: Vec<usize> = blocks.iter().map(|b| b[2]).collect();
    let parts = cut(dqkv, heads.columns(), &lengths);
    context.run(|| {
        let parts = blocks.par_iter().zip(parts).with_max_len(1);
        parts.for_each(|(&block, rows)| match wanted {
            Columns::Query => (0..heads.n_heads).for_each(|h| gradients.queries(block, h, rows)),
            Columns::KeyValue => (0..heads.n_kv_heads).for_each(|h| gradients.keys(block, h, rows)),
        });
    });
}

/// A backward pass and what it reads.
#[derive(Clone, Copy)]
struct Gradients<'a> {
    pass: Pass<'a>,
    inputs: Inputs<'a>,
}

/// The probabilities of a block of pairs and the gradients of their scores.
struct Pairs {
    p: Square,
    ds: Square,
}

impl Pairs {
    fn new() -> Self {
        Pairs {
            p: Square::new(),
            ds: Square::new(),
        }
    }
}

impl Gradients<'_> {
    /// `p` and `ds` for queries and keys by (position in the sequence, rows); zeros where the mask
    /// forbids the pair.
    fn pairs(
        &self,
        (sequence, head): (usize, usize),
        (queries, keys): ((usize, usize), (usize, usize)),
        pairs: &mut Pairs,
    ) {
        let heads = &self.pass.shape.heads;
        let columns = heads.columns();
        let key_head = heads.n_heads + head / heads.group();
        let of = |head, (first, rows): (usize, usize)| {
            self.pass
                .head(self.inputs.qkv, (columns, head), (sequence + first, rows))
        };
        let at = (sequence + queries.0, queries.1);
        let dout = self
            .pass
            .head(self.inputs.dout, (heads.query_columns(), head), at);
        let rows = (of(head, queries), of(key_head, keys));
        self.pass.dots(rows, TensorSum::Chain, &mut pairs.p);
        let token_of = |row: usize| (sequence + queries.0 + row) * heads.n_heads + head;
        for row in 0..queries.1 {
            pairs.ds.data[row * TILE..][..keys.1].fill(-self.inputs.delta[token_of(row)]);
        }
        let rows = (dout, of(key_head + heads.n_kv_heads, keys));
        self.pass.dots(rows, TensorSum::Continue, &mut pairs.ds);
        for row in 0..queries.1 {
            let visible = (queries.0 + row + 1).saturating_sub(keys.0).min(keys.1);
            let gradients = GradientRow {
                p: &mut pairs.p.data[row * TILE..][..keys.1],
                ds: &mut pairs.ds.data[row * TILE..][..keys.1],
                visible,
                factor: score_factor(heads.head_dim),
                statistic: self.inputs.lse[token_of(row)],
            };
            dispatch(self.pass.path, gradients);
        }
    }

    /// `dq` of one query head of a block of queries.
    fn queries(&self, [sequence, start, rows]: [usize; 3], head: usize, out: &mut [f32]) {
        let (shape, heads) = (self.pass.shape, &self.pass.shape.heads);
        let key_head = heads.n_heads + head / heads.group();
        let mut sums = vec![0.0; rows * heads.head_dim];
        let mut pairs = Pairs::new();
        for first in (0..start + rows).step_by(TILE) {
            let tile = (first, TILE.min(shape.seq_len - first));
            self.pairs((sequence, head), ((start, rows), tile), &mut pairs);
            let place = (sequence + tile.0, tile.1);
            let keys = self
                .pass
                .head(self.inputs.qkv, (heads.columns(), key_head), place);
            self.pass.add(Form::Nn, &pairs.ds, keys, &mut sums);
        }
        self.store(&sums, (head, score_scale(heads.head_dim)), out);
    }

    /// `dk` and `dv` of one key head of a block of keys.
    fn keys(&self, [sequence, start, rows]: [usize; 3], kv_head: usize, out: &mut [f32]) {
        let (shape, heads) = (self.pass.shape, &self.pass.shape.heads);
        let [mut dk, mut dv] = [0, 1].map(|_| vec![0.0; rows * heads.head_dim]);
        let mut pairs = Pairs::new();
        for head in kv_head * heads.group()..(kv_head + 1) * heads.group() {
            for first in (start..shape.seq_len).step_by(TILE) {
                let tile = (first, TILE.min(shape.seq_len - first));
                self.pairs((sequence, head), (tile, (start, rows)), &mut pairs);
                let place = (sequence + tile.0, tile.1);
                let queries = self
                    .pass
                    .head(self.inputs.qkv, (heads.columns(), head), place);
                let dout = self
                    .pass
                    .head(self.inputs.dout, (heads.query_columns(), head), place);
                self.pass.add(Form::Tn, &pairs.p, dout, &mut dv);
                self.pass.add(Form::Tn, &pairs.ds, queries, &mut dk);
            }
        }
        let key_head = heads.n_heads + kv_head;
        self.store(&dk, (key_head, score_scale(heads.head_dim)), out);
        self.store(&dv, (key_head + heads.n_kv_heads, 1.0), out);
    }

    /// Writes a head's finished sums, times a factor, to the block's rows of `dqkv`.
    fn store(&self, sums: &[f32], (head, factor): (usize, f32), out: &mut [f32]) {
        let heads = &self.pass.shape.heads;
        let d = heads.head_dim;
        let rows = out.chunks_exact_mut(heads.columns());
        for (out, sums) in rows.zip(sums.chunks_exact(d)) {
            for (out, sum) in out[head * d..][..d].iter_mut().zip(sums) {
                *out = sum * factor;
            }
        }
    }
}

/// One query's pairs: `p` from dot products and `ds = p · dp`, where `dp` has begun at `-delta`, for the first
/// `visible` keys, zeros for the others.
struct GradientRow<'a> {
    p: &'a mut [f32],
    ds: &'a mut [f32],
    visible: usize,
    factor: f32,
    statistic: f32,
}

impl Task for GradientRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let (p, hidden_p) = self.p.split_at_mut(self.visible);
        let (ds, hidden_ds) = self.ds.split_at_mut(self.visible);
        hidden_p.fill(0.0);
        hidden_ds.fill(0.0);
        for p in p.iter_mut() {
            *p = score_weight(*p, self.factor, self.statistic);
        }
        for (p, ds) in p.iter().zip(ds) {
            *ds *= p;
        }
    }
}
