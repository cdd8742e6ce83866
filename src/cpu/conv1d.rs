//! The causal depthwise convolution on the CPU. A task is some rows; channels are the vector lanes.

use std::ops::Range;

use rayon::prelude::*;

use super::arena::Operands;
use super::context::CpuContext;
use super::rows::{Chains, add_to, expect_len, rows_per_task, token_sums};
use super::simd::{Task, dispatch};
use crate::error::DeviceError;
use crate::num::sigmoid;
use crate::op::conv1d::{Conv1d, Conv1dGrad, ConvShape};

/// The operands that both directions read.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    shape: ConvShape,
    xz: &'a [f32],
    bias: &'a [f32],
    /// Transposed, [d_conv, d_inner]: neighbouring channels side by side.
    taps: &'a [f32],
    /// The inputs before each sequence, [batch, d_conv - 1, d_inner]; zeros where it begins anew.
    before: &'a [f32],
}

/// The transposed weight and the inputs before each sequence.
struct Transposed {
    taps: Vec<f32>,
    before: Vec<f32>,
}

/// `matrix` [rows, columns] as [columns, rows].
fn transpose(matrix: &[f32], columns: usize, out: &mut [f32]) {
    let rows = out.len() / columns.max(1);
    for (i, row) in matrix.chunks_exact(columns.max(1)).enumerate() {
        for (j, &x) in row.iter().enumerate() {
            out[j * rows + i] = x;
        }
    }
}

impl Transposed {
    /// Of the operands from read operand `first` on: `xz`, weight, bias, state and flags.
    fn of(
        (shape, carried): (ConvShape, bool),
        operands: &Operands,
        first: usize,
    ) -> Result<Self, DeviceError> {
        let (d, k) = (shape.d_inner, shape.d_conv);
        let weight: &[f32] = operands.read(first + 1)?;
        expect_len("weight", d * k, weight.len())?;
        let mut taps = vec![0.0; d * k];
        transpose(weight, k, &mut taps);
        let each = d * (k - 1);
        let mut before = vec![0.0; shape.batch * each];
        if carried {
            let state: &[f32] = operands.read(first + 3)?;
            let keep: &[u32] = operands.read(first + 4)?;
            expect_len("state", shape.batch * each, state.len())?;
            expect_len("keep", shape.batch, keep.len())?;
            if each > 0 {
                let sequences = before.chunks_exact_mut(each).zip(state.chunks_exact(each));
                for ((before, state), &keep) in sequences.zip(keep) {
                    if keep != 0 {
                        transpose(state, k - 1, before);
                    }
                }
            }
        }
        Ok(Transposed { taps, before })
    }
}

impl<'a> Inputs<'a> {
    fn of(
        shape: ConvShape,
        operands: &Operands<'a>,
        first: usize,
        transposed: &'a Transposed,
    ) -> Result<Self, DeviceError> {
        let inputs = Inputs {
            shape,
            xz: operands.read(first)?,
            bias: operands.read(first + 2)?,
            taps: &transposed.taps,
            before: &transposed.before,
        };
        expect_len("xz", shape.rows() * 2 * shape.d_inner, inputs.xz.len())?;
        expect_len("bias", shape.d_inner, inputs.bias.len())?;
        Ok(inputs)
    }

    /// What tap `j` reads for the row: the input `d_conv - 1 - j` positions earlier.
    #[inline(always)]
    fn input(&self, row: usize, j: usize) -> &'a [f32] {
        let (d, len, k) = (self.shape.d_inner, self.shape.seq_len, self.shape.d_conv);
        let (sequence, t) = (row / len, row % len);
        let back = k - 1 - j;
        match t.checked_sub(back) {
            Some(_) => &self.xz[(row - back) * 2 * d..][..d],
            // Position `t - back` before the sequence is number `t + j` of the inputs before it.
            None => &self.before[(sequence * (k - 1) + t + j) * d..][..d],
        }
    }

    /// `v` of a row: the chain over the taps, then the bias.
    #[inline(always)]
    fn row(&self, row: usize, columns: Range<usize>, v: &mut [f32]) {
        v.fill(0.0);
        for j in 0..self.shape.d_conv {
            let taps = &self.taps[j * self.shape.d_inner..][columns.clone()];
            fma_rows(v, taps, &self.input(row, j)[columns.clone()]);
        }
        add_to(v, &self.bias[columns]);
    }
}

/// `acc[i] = fma(a[i], b[i], acc[i])`.
#[inline(always)]
fn fma_rows(acc: &mut [f32], a: &[f32], b: &[f32]) {
    for ((acc, &a), &b) in acc.iter_mut().zip(a).zip(b) {
        *acc = a.mul_add(b, *acc);
    }
}

struct Forward<'a> {
    inputs: Inputs<'a>,
    first_row: usize,
    u: &'a mut [f32],
}

impl Task for Forward<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let d = self.inputs.shape.d_inner;
        for (row, u) in self.u.chunks_exact_mut(d).enumerate() {
            self.inputs.row(self.first_row + row, 0..d, u);
            for u in u {
                *u *= sigmoid(*u);
            }
        }
    }
}

/// The gradient of `v` for some rows.
struct Values<'a> {
    inputs: Inputs<'a>,
    parts: &'a [&'a [f32]],
    first_row: usize,
    dv: &'a mut [f32],
}

impl Task for Values<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let d = self.inputs.shape.d_inner;
        let mut du = vec![0.0; d];
        for (i, dv) in self.dv.chunks_exact_mut(d).enumerate() {
            let row = self.first_row + i;
            du.fill(0.0);
            for (part, values) in self.parts.iter().enumerate() {
                let values = &values[row * d..][..d];
                match part {
                    0 => du.copy_from_slice(values),
                    _ => add_to(&mut du, values),
                }
            }
            self.inputs.row(row, 0..d, dv);
            for (dv, &du) in dv.iter_mut().zip(&du) {
                let (v, s) = (*dv, sigmoid(*dv));
                *dv = du * (s * v.mul_add(1.0 - s, 1.0));
            }
        }
    }
}

/// The input gradient of some rows, from the gradients of `v` of all rows.
struct InputGrad<'a> {
    inputs: Inputs<'a>,
    dv: &'a [f32],
    first_row: usize,
    dxz: &'a mut [f32],
}

impl Task for InputGrad<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let shape = self.inputs.shape;
        let (d, k) = (shape.d_inner, shape.d_conv);
        for (i, dxz) in self.dxz.chunks_exact_mut(2 * d).enumerate() {
            let row = self.first_row + i;
            let left = shape.seq_len - row % shape.seq_len;
            let dx = &mut dxz[..d];
            dx.fill(0.0);
            for j in 0..k {
                let ahead = k - 1 - j;
                // A term of `weight · +0.0` changes no bit of a chain that began at `+0.0`.
                if ahead < left {
                    let taps = &self.inputs.taps[j * d..][..d];
                    fma_rows(dx, taps, &self.dv[(row + ahead) * d..][..d]);
                }
            }
        }
    }
}

/// The chains of one tap's weight gradient, or of the bias.
struct WeightChains<'a> {
    inputs: Inputs<'a>,
    dv: &'a [f32],
    tap: Option<usize>,
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
        let d = self.inputs.shape.d_inner;
        for t in tokens {
            let dv = &self.dv[t * d..][columns.clone()];
            match self.tap {
                Some(j) => fma_rows(acc, dv, &self.inputs.input(t, j)[columns.clone()]),
                None => add_to(acc, dv),
            }
        }
    }
}

/// The last `d_conv - 1` inputs of every sequence, [batch, d_inner, d_conv - 1].
fn last_inputs(inputs: &Inputs, next: &mut [f32]) {
    let (d, k, len) = (
        inputs.shape.d_inner,
        inputs.shape.d_conv,
        inputs.shape.seq_len,
    );
    if k < 2 || d == 0 {
        return;
    }
    for (sequence, next) in next.chunks_exact_mut(d * (k - 1)).enumerate() {
        // Taps 1.. of the last position read the inputs that tap 0.. of the position after it would.
        for j in 1..k {
            let row = inputs.input((sequence + 1) * len - 1, j);
            for (channel, &x) in row.iter().enumerate() {
                next[channel * (k - 1) + j - 1] = x;
            }
        }
    }
}

/// `u` and, where sequences go on, the last inputs.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn forward(
    context: &CpuContext,
    op: &Conv1d,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let (shape, d) = (op.shape, op.shape.d_inner);
    let transposed = Transposed::of((shape, op.carried), operands, 0)?;
    let inputs = Inputs::of(shape, operands, 0, &transposed)?;
    let u: &mut [f32] = operands.write(0)?;
    expect_len("u", shape.rows() * d, u.len())?;
    let next: &mut [f32] = match op.carried {
        true => operands.write(1)?,
        false => &mut [],
    };
    let states = usize::from(op.carried) * shape.batch * d * (shape.d_conv - 1);
    expect_len("state_next", states, next.len())?;
    if shape.rows() * d == 0 {
        return Ok(());
    }
    let (path, rows) = (context.path(), rows_per_task(d));
    context.run(|| {
        let tasks = u.par_chunks_mut(rows * d).enumerate();
        tasks.for_each(|(index, u)| {
            let task = Forward {
                inputs,
                first_row: index * rows,
                u,
            };
            dispatch(path, task);
        });
    });
    if op.carried {
        last_inputs(&inputs, next);
    }
    Ok(())
}

/// The weight and bias gradients, from the gradients of `v` of all rows.
fn weight_grads(
    context: &CpuContext,
    op: &Conv1dGrad,
    (inputs, dv): (Inputs, &[f32]),
    (dweight, dbias): (&mut [f32], &mut [f32]),
) {
    let (path, d) = (context.path(), op.shape.d_inner);
    let sums = |tap, out: &mut [f32]| {
        token_sums(context, &op.sum, out, |chains| {
            let task = WeightChains {
                inputs,
                dv,
                tap,
                chains,
            };
            dispatch(path, task);
        });
    };
    let mut taps = vec![0.0; dweight.len()];
    for (j, taps) in taps.chunks_exact_mut(d).enumerate() {
        sums(Some(j), taps);
    }
    transpose(&taps, d, dweight);
    sums(None, dbias);
}

/// The gradients of the input and, where they are asked for, of weight and bias.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn grad(
    context: &CpuContext,
    op: &Conv1dGrad,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let (shape, d, k) = (op.shape, op.shape.d_inner, op.shape.d_conv);
    let transposed = Transposed::of((shape, op.carried), operands, op.parts)?;
    let inputs = Inputs::of(shape, operands, op.parts, &transposed)?;
    let mut parts: Vec<&[f32]> = Vec::new();
    for (part, name) in ["du", "du_more"].into_iter().enumerate().take(op.parts) {
        let du = operands.read(part)?;
        expect_len(name, shape.rows() * d, du.len())?;
        parts.push(du);
    }
    let dxz: &mut [f32] = operands.write(0)?;
    expect_len("dxz", shape.rows() * 2 * d, dxz.len())?;
    let weights: Option<(&mut [f32], &mut [f32])> = match op.weight_grad {
        true => Some((operands.write(1)?, operands.write(2)?)),
        false => None,
    };
    if let Some((dweight, dbias)) = &weights {
        expect_len("dweight", d * k, dweight.len())?;
        expect_len("dbias", d, dbias.len())?;
    }
    if shape.rows() * d == 0 {
        return Ok(());
    }
    let (path, rows, parts) = (context.path(), rows_per_task(d), parts.as_slice());
    let mut dv = vec![0.0; shape.rows() * d];
    context.run(|| {
        let tasks = dv.par_chunks_mut(rows * d).enumerate();
        tasks.for_each(|(index, dv)| {
            let first_row = index * rows;
            let task = Values {
                inputs,
                parts,
                first_row,
                dv,
            };
            dispatch(path, task);
        });
        let (dv, tasks) = (&dv, dxz.par_chunks_mut(rows * 2 * d).enumerate());
        tasks.for_each(|(index, dxz)| {
            let first_row = index * rows;
            let task = InputGrad {
                inputs,
                dv,
                first_row,
                dxz,
            };
            dispatch(path, task);
        });
    });
    if let Some(outputs) = weights {
        weight_grads(context, op, (inputs, &dv), outputs);
    }
    Ok(())
}
