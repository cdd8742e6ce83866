//! Low-rank adapters on the CPU: products over column ranges, by the same chains as linear layers.

use rayon::prelude::*;

use super::arena::Operands;
use super::context::CpuContext;
use super::gemm::{Form, Mat, MatMut};
use super::matmul::Product;
use super::rows::expect_len;
use crate::error::DeviceError;
use crate::op::Store;
use crate::op::lora::{
    Adapters, LoraDown, LoraDownGradInput, LoraUp, LoraUpGradInput, LoraUpGradWeight, Part,
};

/// A column range of a row-major matrix.
fn columns(data: &[f32], rows: usize, stride: usize, part: Part) -> Mat<'_> {
    Mat {
        data: data.get(part.first..).unwrap_or_default(),
        rows,
        cols: part.columns,
        stride,
    }
}

/// Each part of an adapted product: its columns of `y`, its columns of `s`, its rows of `b`.
fn parts(adapters: &Adapters) -> impl Iterator<Item = (Part, Part, Part)> {
    let rank = adapters.rank;
    let mut row = 0;
    adapters.parts.iter().enumerate().map(move |(p, &out)| {
        let ranks = Part {
            first: p * rank,
            columns: rank,
        };
        let rows = Part {
            first: row,
            columns: out.columns,
        };
        row += out.columns;
        (out, ranks, rows)
    })
}

fn b_rows<'a>(b: &'a [f32], adapters: &Adapters, rows: Part) -> Mat<'a> {
    let rank = adapters.rank;
    let data = &b[rows.first * rank..][..rows.columns * rank];
    Mat::tight(data, rows.columns, rank)
}

fn scale_all(context: &CpuContext, values: &mut [f32], scale: f32) {
    context.run(|| values.par_iter_mut().for_each(|x| *x *= scale));
}

/// `s = x · aᵀ`.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn down(
    context: &CpuContext,
    op: &LoraDown,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let product = Product {
        math: op.math,
        form: Form::Nt,
        a: Mat::tight(operands.read(0)?, op.rows, op.n_in),
        b: Mat::tight(operands.read(1)?, op.ranks, op.n_in),
        bias: None,
        sum: None,
        store: Store::Assign,
    };
    let s = MatMut::tight(operands.write(0)?, op.rows, op.ranks);
    product.run(context, s)
}

/// `dx (+)= ds · a`.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn down_grad_input(
    context: &CpuContext,
    op: &LoraDownGradInput,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let product = Product {
        math: op.math,
        form: Form::Nn,
        a: Mat::tight(operands.read(0)?, op.rows, op.ranks),
        b: Mat::tight(operands.read(1)?, op.ranks, op.n_in),
        bias: None,
        sum: None,
        store: op.store,
    };
    let dx = MatMut::tight(operands.write(0)?, op.rows, op.n_in);
    product.run(context, dx)
}

/// `y += scale · s · bᵀ` in the columns of each part.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn up(context: &CpuContext, op: &LoraUp, operands: &mut Operands) -> Result<(), DeviceError> {
    let (s, b): (&[f32], &[f32]) = (operands.read(0)?, operands.read(1)?);
    let y: &mut [f32] = operands.write(0)?;
    let (adapters, rows) = (&op.adapters, op.rows);
    expect_len("s", rows * adapters.ranks(), s.len())?;
    expect_len("b", adapters.up_rows() * adapters.rank, b.len())?;
    expect_len("y", rows * adapters.n_out, y.len())?;
    for (out, ranks, b_part) in parts(adapters) {
        let mut sums = vec![0.0; rows * out.columns];
        let product = Product {
            math: op.math,
            form: Form::Nt,
            a: columns(s, rows, adapters.ranks(), ranks),
            b: b_rows(b, adapters, b_part),
            bias: None,
            sum: None,
            store: Store::Assign,
        };
        product.run(context, MatMut::tight(&mut sums, rows, out.columns))?;
        context.run(|| {
            let rows = y.par_chunks_mut(adapters.n_out);
            let sums = sums.par_chunks(out.columns);
            rows.zip(sums).for_each(|(row, sums)| {
                for (y, &sum) in row[out.first..][..out.columns].iter_mut().zip(sums) {
                    *y = adapters.scale.mul_add(sum, *y);
                }
            });
        });
    }
    Ok(())
}

/// `ds = scale · dy · b`, each part from its columns of `dy`.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn up_grad_input(
    context: &CpuContext,
    op: &LoraUpGradInput,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let (dy, b): (&[f32], &[f32]) = (operands.read(0)?, operands.read(1)?);
    let ds: &mut [f32] = operands.write(0)?;
    let (adapters, rows) = (&op.adapters, op.rows);
    expect_len("dy", rows * adapters.n_out, dy.len())?;
    expect_len("b", adapters.up_rows() * adapters.rank, b.len())?;
    expect_len("ds", rows * adapters.ranks(), ds.len())?;
    for (out, ranks, b_part) in parts(adapters) {
        let product = Product {
            math: op.math,
            form: Form::Nn,
            a: columns(dy, rows, adapters.n_out, out),
            b: b_rows(b, adapters, b_part),
            bias: None,
            sum: None,
            store: Store::Assign,
        };
        let target = MatMut {
            data: &mut ds[ranks.first..],
            rows,
            cols: ranks.columns,
            stride: adapters.ranks(),
        };
        product.run(context, target)?;
    }
    scale_all(context, ds, adapters.scale);
    Ok(())
}

/// `db = scale · dyᵀ · s`, each part from its columns of both.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn up_grad_weight(
    context: &CpuContext,
    op: &LoraUpGradWeight,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let (dy, s): (&[f32], &[f32]) = (operands.read(0)?, operands.read(1)?);
    let db: &mut [f32] = operands.write(0)?;
    let (adapters, tokens) = (&op.adapters, op.sum.tokens);
    expect_len("dy", tokens * adapters.n_out, dy.len())?;
    expect_len("s", tokens * adapters.ranks(), s.len())?;
    expect_len("db", adapters.up_rows() * adapters.rank, db.len())?;
    let rank = adapters.rank;
    for (out, ranks, b_part) in parts(adapters) {
        let product = Product {
            math: op.math,
            form: Form::Tn,
            a: columns(dy, tokens, adapters.n_out, out),
            b: columns(s, tokens, adapters.ranks(), ranks),
            bias: None,
            sum: Some(op.sum),
            store: Store::Assign,
        };
        let block = &mut db[b_part.first * rank..][..b_part.columns * rank];
        product.run(context, MatMut::tight(block, out.columns, rank))?;
    }
    scale_all(context, db, adapters.scale);
    Ok(())
}
