//! SwiGLU on the CPU.

use rayon::prelude::*;

use super::arena::Operands;
use super::context::CpuContext;
use super::rows::{expect_len, rows_per_task};
use super::simd::{Task, dispatch};
use crate::error::DeviceError;
use crate::num::{narrow_sigmoid, sigmoid};
use crate::op::swiglu::{Output, SwiGlu, SwiGluGrad};
use crate::shape::{DType, Math};

/// The sigmoid of the gates, by what they are stored as.
#[inline(always)]
fn gate_sigmoid<const NARROW: bool>(g: f32) -> f32 {
    if NARROW {
        narrow_sigmoid(g)
    } else {
        sigmoid(g)
    }
}

fn is_narrow(math: Math) -> bool {
    math.storage() != DType::F32
}

struct Forward<'a, const NARROW: bool> {
    gate_up: &'a [f32],
    a: &'a mut [f32],
    d_ff: usize,
}

impl<const NARROW: bool> Task for Forward<'_, NARROW> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let n = self.d_ff;
        let rows = self.a.chunks_exact_mut(n);
        for (a, gate_up) in rows.zip(self.gate_up.chunks_exact(2 * n)) {
            let (gate, up) = gate_up.split_at(n);
            forward_row::<NARROW>(a, gate, up);
        }
    }
}

#[inline(always)]
fn forward_row<const NARROW: bool>(a: &mut [f32], gate: &[f32], up: &[f32]) {
    for ((a, &g), &u) in a.iter_mut().zip(gate).zip(up) {
        *a = (g * gate_sigmoid::<NARROW>(g)) * u;
    }
}

/// The gradient of the output, which is only read, or overwritten with the output.
enum OutputGrad<'a> {
    Read(&'a [f32]),
    Restored(&'a mut [f32]),
}

struct Backward<'a, const NARROW: bool> {
    da: OutputGrad<'a>,
    gate_up: &'a mut [f32],
    d_ff: usize,
}

impl<const NARROW: bool> Task for Backward<'_, NARROW> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let n = self.d_ff;
        let rows = self.gate_up.chunks_exact_mut(2 * n);
        match self.da {
            OutputGrad::Read(da) => {
                for (gate_up, da) in rows.zip(da.chunks_exact(n)) {
                    let (gate, up) = gate_up.split_at_mut(n);
                    backward_row::<NARROW>(gate, up, da);
                }
            }
            OutputGrad::Restored(da) => {
                for (gate_up, da) in rows.zip(da.chunks_exact_mut(n)) {
                    let (gate, up) = gate_up.split_at_mut(n);
                    restoring_row::<NARROW>(gate, up, da);
                }
            }
        }
    }
}

/// Elements whose sigmoids are computed together; a loop that also writes two rows is not vectorised.
const BLOCK: usize = 64;

#[inline(always)]
fn sigmoids<const NARROW: bool>(gate: &[f32]) -> [f32; BLOCK] {
    let mut sigmoids = [0.0; BLOCK];
    for (s, &g) in sigmoids.iter_mut().zip(gate) {
        *s = gate_sigmoid::<NARROW>(g);
    }
    sigmoids
}

#[inline(always)]
fn backward_row<const NARROW: bool>(gate: &mut [f32], up: &mut [f32], da: &[f32]) {
    let rows = gate.chunks_mut(BLOCK).zip(up.chunks_mut(BLOCK));
    for ((gate, up), da) in rows.zip(da.chunks(BLOCK)) {
        let sigmoids = sigmoids::<NARROW>(gate);
        backward_block(gate, up, da, &sigmoids);
    }
}

/// As [`backward_row`], with the output over its gradient.
#[inline(always)]
fn restoring_row<const NARROW: bool>(gate: &mut [f32], up: &mut [f32], da: &mut [f32]) {
    let rows = gate.chunks_mut(BLOCK).zip(up.chunks_mut(BLOCK));
    for ((gate, up), da) in rows.zip(da.chunks_mut(BLOCK)) {
        let sigmoids = sigmoids::<NARROW>(gate);
        let mut output = [0.0; BLOCK];
        for (((a, &g), &u), &s) in output.iter_mut().zip(&*gate).zip(&*up).zip(&sigmoids) {
            *a = (g * s) * u;
        }
        backward_block(gate, up, da, &sigmoids);
        da.copy_from_slice(&output[..da.len()]);
    }
}

#[inline(always)]
fn backward_block(gate: &mut [f32], up: &mut [f32], da: &[f32], sigmoids: &[f32; BLOCK]) {
    for (((gate, up), &da), &s) in gate.iter_mut().zip(up).zip(da).zip(sigmoids) {
        let (g, u) = (*gate, *up);
        *up = da * (g * s);
        *gate = (da * u) * (s * g.mul_add(1.0 - s, 1.0));
    }
}

/// `a = (g · sigmoid(g)) · u`.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn forward(
    context: &CpuContext,
    op: &SwiGlu,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let gate_up: &[f32] = operands.read(0)?;
    let a: &mut [f32] = operands.write(0)?;
    let d_ff = op.d_ff;
    expect_len("gate_up", op.rows * 2 * d_ff, gate_up.len())?;
    expect_len("a", op.rows * d_ff, a.len())?;
    if d_ff == 0 {
        return Ok(());
    }
    match is_narrow(op.math) {
        true => forward_rows::<true>(context, gate_up, a, d_ff),
        false => forward_rows::<false>(context, gate_up, a, d_ff),
    }
    Ok(())
}

fn forward_rows<const NARROW: bool>(
    context: &CpuContext,
    gate_up: &[f32],
    a: &mut [f32],
    d_ff: usize,
) {
    let (path, rows) = (context.path(), rows_per_task(2 * d_ff));
    context.run(|| {
        let tasks = a.par_chunks_mut(rows * d_ff);
        let tasks = tasks.zip(gate_up.par_chunks(rows * 2 * d_ff));
        tasks.for_each(|(a, gate_up)| dispatch(path, Forward::<NARROW> { gate_up, a, d_ff }));
    });
}

/// The gradients of `g` and `u`, written over them, and the output over its gradient where it is restored.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn grad(
    context: &CpuContext,
    op: &SwiGluGrad,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let (da, gate_up): (_, &mut [f32]) = match op.output {
        Output::Left => (OutputGrad::Read(operands.read(0)?), operands.write(0)?),
        Output::Restored => (OutputGrad::Restored(operands.write(0)?), operands.write(1)?),
    };
    let d_ff = op.d_ff;
    let found = match &da {
        OutputGrad::Read(da) => da.len(),
        OutputGrad::Restored(da) => da.len(),
    };
    expect_len("da", op.rows * d_ff, found)?;
    expect_len("gate_up", op.rows * 2 * d_ff, gate_up.len())?;
    if d_ff == 0 {
        return Ok(());
    }
    match is_narrow(op.math) {
        true => grad_rows::<true>(context, da, gate_up, d_ff),
        false => grad_rows::<false>(context, da, gate_up, d_ff),
    }
    Ok(())
}

fn grad_rows<const NARROW: bool>(
    context: &CpuContext,
    da: OutputGrad,
    gate_up: &mut [f32],
    d_ff: usize,
) {
    let (path, rows) = (context.path(), rows_per_task(2 * d_ff));
    let run = |da, gate_up| dispatch(path, Backward::<NARROW> { da, gate_up, d_ff });
    context.run(|| {
        let tasks = gate_up.par_chunks_mut(rows * 2 * d_ff);
        match da {
            OutputGrad::Read(da) => tasks
                .zip(da.par_chunks(rows * d_ff))
                .for_each(|(gate_up, da)| run(OutputGrad::Read(da), gate_up)),
            OutputGrad::Restored(da) => tasks
                .zip(da.par_chunks_mut(rows * d_ff))
                .for_each(|(gate_up, da)| run(OutputGrad::Restored(da), gate_up)),
        }
    });
}
