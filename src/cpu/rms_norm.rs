//! RMS norm on the CPU.

use rayon::prelude::*;

use super::arena::Operands;
use super::context::CpuContext;
use super::rows::{Chains, expect_len, rows_per_task, token_sums};
use super::simd::{Task, dispatch};
use crate::error::DeviceError;
use crate::num::lanes::{lane_reduce_rows, lane_sum_of_squares};
use crate::op::Store;
use crate::op::rms_norm::{RmsNorm, RmsNormGrad};

/// `1 / sqrt(Σ r² / d + eps)` of one row.
#[inline(always)]
pub(super) fn row_rstd(r: &[f32], eps: f32) -> f32 {
    1.0 / (lane_sum_of_squares(r) / r.len() as f32 + eps).sqrt()
}

/// `h = (r · rstd) · weight` of one row.
#[inline(always)]
pub(super) fn scale_row(h: &mut [f32], r: &[f32], weight: &[f32], rstd: f32) {
    for ((h, &r), &w) in h.iter_mut().zip(r).zip(weight) {
        *h = (r * rstd) * w;
    }
}

/// `c = (Σ g · x̂) / d` of one row, with `g = dh · weight` and `x̂ = r · rstd`.
#[inline(always)]
pub(super) fn row_coefficient(dh: &[f32], r: &[f32], weight: &[f32], rstd: f32) -> f32 {
    let dot = lane_reduce_rows([dh, r, weight], |[dh, r, w], acc| {
        (dh * w).mul_add(r * rstd, acc)
    });
    dot / r.len() as f32
}

/// One element of the input gradient: `rstd · fma(-x̂, c, g)`.
#[inline(always)]
pub(super) fn input_gradient(g: f32, r: f32, rstd: f32, c: f32) -> f32 {
    rstd * (-(r * rstd)).mul_add(c, g)
}

/// `acc[j] = fma(dh[j], x̂[j], acc[j])`: one token's part of the weight gradient.
#[inline(always)]
pub(super) fn weight_step(acc: &mut [f32], dh: &[f32], r: &[f32], rstd: f32) {
    for ((acc, &dh), &r) in acc.iter_mut().zip(dh).zip(r) {
        *acc = dh.mul_add(r * rstd, *acc);
    }
}

struct Forward<'a> {
    x: &'a [f32],
    /// What is added to `x`, and where the sum goes.
    residual: Option<(&'a [f32], &'a mut [f32])>,
    weight: &'a [f32],
    h: &'a mut [f32],
    rstd: &'a mut [f32],
    eps: f32,
}

impl Task for Forward<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let d = self.weight.len();
        let input: &[f32] = match self.residual {
            None => self.x,
            Some((delta, r)) => {
                add_rows(r, self.x, delta);
                r
            }
        };
        let rows = self.h.chunks_exact_mut(d).zip(input.chunks_exact(d));
        for ((h, r), rstd) in rows.zip(self.rstd) {
            *rstd = row_rstd(r, self.eps);
            scale_row(h, r, self.weight, *rstd);
        }
    }
}

#[inline(always)]
fn add_rows(r: &mut [f32], x: &[f32], delta: &[f32]) {
    for ((r, &x), &delta) in r.iter_mut().zip(x).zip(delta) {
        *r = x + delta;
    }
}

struct InputGrad<'a> {
    dh: &'a [f32],
    r: &'a [f32],
    weight: &'a [f32],
    rstd: &'a [f32],
    dr: &'a mut [f32],
    store: Store,
}

impl Task for InputGrad<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let (d, weight) = (self.weight.len(), self.weight);
        let rows = self.dr.chunks_exact_mut(d).zip(self.dh.chunks_exact(d));
        let rows = rows.zip(self.r.chunks_exact(d)).zip(self.rstd);
        for (((dr, dh), r), &rstd) in rows {
            let c = row_coefficient(dh, r, weight, rstd);
            match self.store {
                Store::Assign => assign_row(dr, (dh, r, weight), rstd, c),
                Store::Add => add_row(dr, (dh, r, weight), rstd, c),
            }
        }
    }
}

#[inline(always)]
fn assign_row(dr: &mut [f32], (dh, r, weight): (&[f32], &[f32], &[f32]), rstd: f32, c: f32) {
    for (((dr, &dh), &r), &w) in dr.iter_mut().zip(dh).zip(r).zip(weight) {
        *dr = input_gradient(dh * w, r, rstd, c);
    }
}

#[inline(always)]
fn add_row(dr: &mut [f32], (dh, r, weight): (&[f32], &[f32], &[f32]), rstd: f32, c: f32) {
    for (((dr, &dh), &r), &w) in dr.iter_mut().zip(dh).zip(r).zip(weight) {
        *dr += input_gradient(dh * w, r, rstd, c);
    }
}

struct WeightChains<'a> {
    dh: &'a [f32],
    r: &'a [f32],
    rstd: &'a [f32],
    d_model: usize,
    chains: Chains<'a>,
}

impl Task for WeightChains<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let Chains {
            tokens,
            columns,
            acc,
        } = self.chains;
        for t in tokens {
            let dh = &self.dh[t * self.d_model..][columns.clone()];
            let r = &self.r[t * self.d_model..][columns.clone()];
            weight_step(acc, dh, r, self.rstd[t]);
        }
    }
}

/// The norm of every row, of `x` or of `x + delta`.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn forward(
    context: &CpuContext,
    op: &RmsNorm,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let (d, residual) = (op.d_model, usize::from(op.residual));
    let n = op.rows * d;
    let x: &[f32] = operands.read(0)?;
    let sum: Option<(&[f32], &mut [f32])> = match op.residual {
        true => Some((operands.read(1)?, operands.write(0)?)),
        false => None,
    };
    let weight: &[f32] = operands.read(1 + residual)?;
    let h: &mut [f32] = operands.write(residual)?;
    let rstd: &mut [f32] = operands.write(1 + residual)?;
    expect_len("x", n, x.len())?;
    if let Some((delta, r)) = &sum {
        expect_len("delta", n, delta.len())?;
        expect_len("r", n, r.len())?;
    }
    expect_len("weight", d, weight.len())?;
    expect_len("h", n, h.len())?;
    expect_len("rstd", op.rows, rstd.len())?;
    if d == 0 {
        return Ok(());
    }
    let (path, eps, rows) = (context.path(), op.eps, rows_per_task(d));
    let tasks = h.par_chunks_mut(rows * d).zip(rstd.par_chunks_mut(rows));
    let tasks = tasks.zip(x.par_chunks(rows * d));
    let run = |((h, rstd), x), residual| {
        let task = Forward {
            x,
            residual,
            weight,
            h,
            rstd,
            eps,
        };
        dispatch(path, task);
    };
    context.run(|| match sum {
        None => tasks.for_each(|outputs| run(outputs, None)),
        Some((delta, r)) => {
            let sums = delta.par_chunks(rows * d).zip(r.par_chunks_mut(rows * d));
            tasks
                .zip(sums)
                .for_each(|(outputs, sum)| run(outputs, Some(sum)));
        }
    });
    Ok(())
}

/// The input gradient of every row and, where it is asked for, the weight gradient.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn grad(
    context: &CpuContext,
    op: &RmsNormGrad,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let (d, tokens) = (op.d_model, op.sum.tokens);
    let dh: &[f32] = operands.read(0)?;
    let r: &[f32] = operands.read(1)?;
    let weight: &[f32] = operands.read(2)?;
    let rstd: &[f32] = operands.read(3)?;
    let dr: &mut [f32] = operands.write(0)?;
    let dweight: Option<&mut [f32]> = match op.weight_grad {
        true => Some(operands.write(1 + usize::from(op.delta_grad))?),
        false => None,
    };
    let ddelta: Option<&mut [f32]> = match op.delta_grad {
        true => Some(operands.write(1)?),
        false => None,
    };
    let ddelta_len = ddelta.as_ref().map_or(tokens * d, |x| x.len());
    expect_len("ddelta", tokens * d, ddelta_len)?;
    for (name, found) in [("dh", dh.len()), ("r", r.len()), ("dr", dr.len())] {
        expect_len(name, tokens * d, found)?;
    }
    expect_len("weight", d, weight.len())?;
    expect_len("rstd", tokens, rstd.len())?;
    expect_len("dweight", d, dweight.as_ref().map_or(d, |w| w.len()))?;
    if d == 0 {
        return Ok(());
    }
    let (path, store, rows) = (context.path(), op.store, rows_per_task(d));
    context.run(|| {
        let tasks = dr.par_chunks_mut(rows * d).zip(dh.par_chunks(rows * d));
        let inputs = r.par_chunks(rows * d).zip(rstd.par_chunks(rows));
        tasks.zip(inputs).for_each(|((dr, dh), (r, rstd))| {
            let task = InputGrad {
                dh,
                r,
                weight,
                rstd,
                dr,
                store,
            };
            dispatch(path, task);
        });
        if let Some(ddelta) = ddelta {
            let parts = ddelta.par_chunks_mut(rows * d).zip(dr.par_chunks(rows * d));
            parts.for_each(|(ddelta, dr)| ddelta.copy_from_slice(dr));
        }
    });
    if let Some(dweight) = dweight {
        token_sums(context, &op.sum, dweight, |chains| {
            let task = WeightChains {
                dh,
                r,
                rstd,
                d_model: d,
                chains,
            };
            dispatch(path, task);
        });
    }
    Ok(())
}
