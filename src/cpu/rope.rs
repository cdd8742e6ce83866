//! Rotary position embedding on the CPU, alone or fused with the norms of the heads.

use rayon::prelude::*;

use super::arena::Operands;
use super::context::CpuContext;
use super::rms_norm::{input_gradient, row_coefficient, row_rstd, scale_row, weight_step};
use super::rows::{Chains, expect_len, rows_per_task, token_sums};
use super::simd::{SimdPath, Task, dispatch};
use crate::error::DeviceError;
use crate::op::rope::{Heads, QkNormRope, QkNormRopeGrad, Rope, RopeGrad};

/// Which way heads are turned.
#[derive(Clone, Copy)]
enum Turn {
    Forward,
    Inverse,
}

/// The rotary table: for each position `head_dim / 2` pairs of cosine and sine.
#[derive(Clone, Copy)]
struct Angles<'a> {
    table: &'a [f32],
    seq_len: usize,
    /// Pairs of a position.
    half: usize,
}

impl<'a> Angles<'a> {
    fn new(table: &'a [f32], seq_len: usize, heads: &Heads) -> Result<Self, DeviceError> {
        let half = heads.head_dim / 2;
        expect_len("table", seq_len.max(1) * half * 2, table.len())?;
        Ok(Angles {
            table,
            seq_len: seq_len.max(1),
            half,
        })
    }

    /// Splits the pairs of a row's position, so that heads read each half with whole vectors.
    #[inline(always)]
    fn split(&self, row: usize, cos: &mut [f32], sin: &mut [f32]) {
        let start = (row % self.seq_len) * self.half * 2;
        let pairs = self.table[start..].chunks_exact(2);
        for ((cos, sin), pair) in cos.iter_mut().zip(sin).zip(pairs) {
            *cos = pair[0];
            *sin = pair[1];
        }
    }
}

/// Turns one head in place.
#[inline(always)]
fn turn_head(head: &mut [f32], cos: &[f32], sin: &[f32], turn: Turn) {
    let (a, b) = head.split_at_mut(cos.len());
    match turn {
        Turn::Forward => turn_forward(a, b, cos, sin),
        Turn::Inverse => turn_inverse(a, b, cos, sin),
    }
}

#[inline(always)]
fn turn_forward(a: &mut [f32], b: &mut [f32], cos: &[f32], sin: &[f32]) {
    for (((a, b), &cos), &sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
        let (x, y) = (*a, *b);
        *a = x.mul_add(cos, -(y * sin));
        *b = y.mul_add(cos, x * sin);
    }
}

#[inline(always)]
fn turn_inverse(a: &mut [f32], b: &mut [f32], cos: &[f32], sin: &[f32]) {
    for (((a, b), &cos), &sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
        let (x, y) = (*a, *b);
        *a = x.mul_add(cos, y * sin);
        *b = y.mul_add(cos, -(x * sin));
    }
}

/// Turns the heads of neighbouring rows in place.
struct TurnRows<'a> {
    angles: Angles<'a>,
    first_row: usize,
    rows: &'a mut [f32],
    heads: Heads,
    turn: Turn,
}

impl Task for TurnRows<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let (d, half) = (self.heads.head_dim, self.angles.half);
        let mut pairs = vec![0.0; 2 * half];
        let (cos, sin) = pairs.split_at_mut(half);
        let rows = self.rows.chunks_exact_mut(self.heads.columns());
        for (qkv, row) in rows.zip(self.first_row..) {
            self.angles.split(row, cos, sin);
            for head in qkv[..self.heads.rotated() * d].chunks_exact_mut(d) {
                turn_head(head, cos, sin, self.turn);
            }
        }
    }
}

/// Turns every row of `qkv`.
fn turn_all(context: &CpuContext, angles: Angles, heads: Heads, qkv: &mut [f32], turn: Turn) {
    let (path, rows) = (context.path(), rows_per_task(heads.columns()));
    context.run(|| {
        let tasks = qkv.par_chunks_mut(rows * heads.columns()).enumerate();
        tasks.for_each(|(index, part)| {
            let task = TurnRows {
                angles,
                first_row: index * rows,
                rows: part,
                heads,
                turn,
            };
            dispatch(path, task);
        });
    });
}

/// Rotates queries and keys in place.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn forward(
    context: &CpuContext,
    op: &Rope,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let angles = Angles::new(operands.read(0)?, op.seq_len, &op.heads)?;
    let qkv: &mut [f32] = operands.write(0)?;
    expect_len("qkv", op.rows * op.heads.columns(), qkv.len())?;
    if !qkv.is_empty() {
        turn_all(context, angles, op.heads, qkv, Turn::Forward);
    }
    Ok(())
}

/// Rotates the gradients of queries and keys back in place.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn grad(
    context: &CpuContext,
    op: &RopeGrad,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let angles = Angles::new(operands.read(0)?, op.seq_len, &op.heads)?;
    let dqkv: &mut [f32] = operands.write(0)?;
    expect_len("dqkv", op.rows * op.heads.columns(), dqkv.len())?;
    if !dqkv.is_empty() {
        turn_all(context, angles, op.heads, dqkv, Turn::Inverse);
    }
    Ok(())
}

/// The norm weights of both kinds of heads.
#[derive(Clone, Copy)]
struct HeadWeights<'a> {
    query: &'a [f32],
    key: &'a [f32],
    n_heads: usize,
}

impl<'a> HeadWeights<'a> {
    fn new(query: &'a [f32], key: &'a [f32], heads: &Heads) -> Result<Self, DeviceError> {
        expect_len("q_weight", heads.head_dim, query.len())?;
        expect_len("k_weight", heads.head_dim, key.len())?;
        Ok(HeadWeights {
            query,
            key,
            n_heads: heads.n_heads,
        })
    }

    /// The weight of a rotated head.
    #[inline(always)]
    fn of(&self, head: usize) -> &'a [f32] {
        match head < self.n_heads {
            true => self.query,
            false => self.key,
        }
    }
}

struct NormRows<'a> {
    angles: Angles<'a>,
    weights: HeadWeights<'a>,
    heads: Heads,
    eps: f32,
    first_row: usize,
    qkv: &'a [f32],
    rotated: &'a mut [f32],
    rstd: &'a mut [f32],
}

impl Task for NormRows<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let (d, half) = (self.heads.head_dim, self.angles.half);
        let (columns, n) = (self.heads.columns(), self.heads.rotated());
        let mut pairs = vec![0.0; 2 * half];
        let (cos, sin) = pairs.split_at_mut(half);
        let rows = self.rotated.chunks_exact_mut(columns);
        let rows = rows.zip(self.qkv.chunks_exact(columns));
        for (index, (out, qkv)) in rows.enumerate() {
            self.angles.split(self.first_row + index, cos, sin);
            out[n * d..].copy_from_slice(&qkv[n * d..]);
            let rstd = &mut self.rstd[index * n..][..n];
            let heads = out.chunks_exact_mut(d).zip(qkv.chunks_exact(d)).zip(rstd);
            for (head, ((out, x), rstd)) in heads.enumerate() {
                *rstd = row_rstd(x, self.eps);
                scale_row(out, x, self.weights.of(head), *rstd);
                turn_head(out, cos, sin, Turn::Forward);
            }
        }
    }
}

/// The norm and the rotation of every query and key head.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn norm_forward(
    context: &CpuContext,
    op: &QkNormRope,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let (heads, eps) = (op.heads, op.eps);
    let (columns, n) = (heads.columns(), heads.rotated());
    let qkv: &[f32] = operands.read(0)?;
    let weights = HeadWeights::new(operands.read(1)?, operands.read(2)?, &heads)?;
    let angles = Angles::new(operands.read(3)?, op.seq_len, &heads)?;
    let rotated: &mut [f32] = operands.write(0)?;
    let rstd: &mut [f32] = operands.write(1)?;
    expect_len("qkv", op.rows * columns, qkv.len())?;
    expect_len("rotated", op.rows * columns, rotated.len())?;
    expect_len("rstd", op.rows * n, rstd.len())?;
    if columns == 0 || n == 0 {
        rotated.copy_from_slice(qkv);
        return Ok(());
    }
    let (path, rows) = (context.path(), rows_per_task(columns));
    context.run(|| {
        let outputs = rotated.par_chunks_mut(rows * columns);
        let outputs = outputs.zip(rstd.par_chunks_mut(rows * n));
        let tasks = outputs.zip(qkv.par_chunks(rows * columns)).enumerate();
        tasks.for_each(|(index, ((rotated, rstd), qkv))| {
            let task = NormRows {
                angles,
                weights,
                heads,
                eps,
                first_row: index * rows,
                qkv,
                rotated,
                rstd,
            };
            dispatch(path, task);
        });
    });
    Ok(())
}

/// What the norm's backward reads besides the gradient.
#[derive(Clone, Copy)]
struct Normed<'a> {
    qkv: &'a [f32],
    rstd: &'a [f32],
    heads: Heads,
}

/// The norm's backward on neighbouring rows, in place.
struct NormGradRows<'a> {
    normed: Normed<'a>,
    weights: HeadWeights<'a>,
    first_row: usize,
    dqkv: &'a mut [f32],
}

impl Task for NormGradRows<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let Normed { qkv, rstd, heads } = self.normed;
        let (d, columns, n) = (heads.head_dim, heads.columns(), heads.rotated());
        for (dqkv, row) in self.dqkv.chunks_exact_mut(columns).zip(self.first_row..) {
            let x = qkv[row * columns..][..n * d].chunks_exact(d);
            let rstd = &rstd[row * n..][..n];
            let rows = dqkv.chunks_exact_mut(d).zip(x).zip(rstd);
            for (head, ((dh, x), &rstd)) in rows.enumerate() {
                let weight = self.weights.of(head);
                let c = row_coefficient(dh, x, weight, rstd);
                grad_head(dh, x, weight, (rstd, c));
            }
        }
    }
}

#[inline(always)]
fn grad_head(dh: &mut [f32], x: &[f32], weight: &[f32], (rstd, c): (f32, f32)) {
    for ((dh, &x), &w) in dh.iter_mut().zip(x).zip(weight) {
        *dh = input_gradient(*dh * w, x, rstd, c);
    }
}

/// The weight gradient of one kind of heads over one piece.
struct WeightChains<'a> {
    normed: Normed<'a>,
    dqkv: &'a [f32],
    /// The heads of this kind.
    kind: std::ops::Range<usize>,
    chains: Chains<'a>,
}

impl Task for WeightChains<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let Normed { qkv, rstd, heads } = self.normed;
        let Chains {
            tokens,
            columns,
            acc,
        } = self.chains;
        for t in tokens {
            for head in self.kind.clone() {
                let start = t * heads.columns() + head * heads.head_dim;
                let dh = &self.dqkv[start..][columns.clone()];
                let x = &qkv[start..][columns.clone()];
                weight_step(acc, dh, x, rstd[t * heads.rotated() + head]);
            }
        }
    }
}

/// The inverse rotation and the norm's backward in place, and the weight gradients where asked for.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn norm_grad(
    context: &CpuContext,
    op: &QkNormRopeGrad,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let (heads, tokens) = (op.heads, op.sum.tokens);
    let normed = Normed {
        qkv: operands.read(0)?,
        rstd: operands.read(4)?,
        heads,
    };
    let weights = HeadWeights::new(operands.read(1)?, operands.read(2)?, &heads)?;
    let angles = Angles::new(operands.read(3)?, op.seq_len, &heads)?;
    let dqkv: &mut [f32] = operands.write(0)?;
    expect_len("qkv", tokens * heads.columns(), normed.qkv.len())?;
    expect_len("rstd", tokens * heads.rotated(), normed.rstd.len())?;
    expect_len("dqkv", tokens * heads.columns(), dqkv.len())?;
    let targets: Option<[&mut [f32]; 2]> = match op.weight_grad {
        true => Some([operands.write(1)?, operands.write(2)?]),
        false => None,
    };
    if let Some([dq_weight, dk_weight]) = &targets {
        expect_len("dq_weight", heads.head_dim, dq_weight.len())?;
        expect_len("dk_weight", heads.head_dim, dk_weight.len())?;
    }
    if heads.columns() == 0 {
        return Ok(());
    }
    turn_all(context, angles, heads, dqkv, Turn::Inverse);
    let path = context.path();
    if let Some(targets) = targets {
        let dqkv: &[f32] = dqkv;
        let kinds = [0..heads.n_heads, heads.n_heads..heads.rotated()];
        for (target, kind) in targets.into_iter().zip(kinds) {
            token_sums(context, &op.sum, target, |chains| {
                let task = WeightChains {
                    normed,
                    dqkv,
                    kind: kind.clone(),
                    chains,
                };
                dispatch(path, task);
            });
        }
    }
    norm_grad_all(context, path, (normed, weights), dqkv);
    Ok(())
}

fn norm_grad_all(
    context: &CpuContext,
    path: SimdPath,
    (normed, weights): (Normed, HeadWeights),
    dqkv: &mut [f32],
) {
    let columns = normed.heads.columns();
    let rows = rows_per_task(columns);
    context.run(|| {
        let tasks = dqkv.par_chunks_mut(rows * columns).enumerate();
        tasks.for_each(|(index, dqkv)| {
            let task = NormGradRows {
                normed,
                weights,
                first_row: index * rows,
                dqkv,
            };
            dispatch(path, task);
        });
    });
}
