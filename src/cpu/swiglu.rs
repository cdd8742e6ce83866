//! SwiGLU on the CPU.

use rayon::prelude::*;

use super::arena::Operands;
use super::context::CpuContext;
use super::rows::{expect_len, rows_per_task};
use super::simd::{Task, dispatch};
use crate::error::DeviceError;
use crate::num::{narrow_sigmoid, sigmoid};
use crate::op::swiglu::{SwiGlu, SwiGluGrad};
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

struct Backward<'a, const NARROW: bool> {
    da: &'a [f32],
    gate_up: &'a mut [f32],
    d_ff: usize,
}

impl<const NARROW: bool> Task for Backward<'_, NARROW> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let n = self.d_ff;
        let rows = self.gate_up.chunks_exact_mut(2 * n);
        for (gate_up, da) in rows.zip(self.da.chunks_exact(n)) {
            let (gate, up) = gate_up.split_at_mut(n);
            backward_row::<NARROW>(gate, up, da);
        }
    }
}

/// Elements whose sigmoids are computed together; a loop that also writes two rows is not vectorised.
const BLOCK: usize = 64;

#[inline(always)]
fn backward_row<const NARROW: bool>(gate: &mut [f32], up: &mut [f32], da: &[f32]) {
    let mut sigmoids = [0.0; BLOCK];
    let rows = gate.chunks_mut(BLOCK).zip(up.chunks_mut(BLOCK));
    for ((gate, up), da) in rows.zip(da.chunks(BLOCK)) {
        for (s, &g) in sigmoids.iter_mut().zip(gate.iter()) {
            *s = gate_sigmoid::<NARROW>(g);
        }
        backward_block(gate, up, da, &sigmoids);
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

/// The gradients of `g` and `u`, written over them.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn grad(
    context: &CpuContext,
    op: &SwiGluGrad,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let da: &[f32] = operands.read(0)?;
    let gate_up: &mut [f32] = operands.write(0)?;
    let d_ff = op.d_ff;
    expect_len("da", op.rows * d_ff, da.len())?;
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
    da: &[f32],
    gate_up: &mut [f32],
    d_ff: usize,
) {
    let (path, rows) = (context.path(), rows_per_task(2 * d_ff));
    context.run(|| {
        let tasks = gate_up.par_chunks_mut(rows * 2 * d_ff);
        let tasks = tasks.zip(da.par_chunks(rows * d_ff));
        tasks.for_each(|(gate_up, da)| dispatch(path, Backward::<NARROW> { da, gate_up, d_ff }));
    });
}
