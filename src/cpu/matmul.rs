//! Linear layers on the CPU: the three matrix products over the blocked chain.

use super::arena::Operands;
use super::context::CpuContext;
use super::gemm::{Form, Gemm, Mat, MatMut, gemm};
use crate::error::DeviceError;
use crate::op::Store;
use crate::op::matmul::{Matmul, MatmulGradInput, MatmulGradWeight};

/// `y = x · weightᵀ (+ bias)`.
pub fn forward(
    context: &CpuContext,
    op: &Matmul,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let bias = match op.bias {
        true => Some(operands.read(2)?),
        false => None,
    };
    let product = Gemm {
        form: Form::Nt,
        a: Mat::tight(operands.read(0)?, op.rows, op.n_in),
        b: Mat::tight(operands.read(1)?, op.n_out, op.n_in),
        bias,
        sum: None,
        store: Store::Assign,
    };
    let y = MatMut::tight(operands.write(0)?, op.rows, op.n_out);
    gemm(context, &product, y)
}

/// `dx = dy · weight`.
pub fn grad_input(
    context: &CpuContext,
    op: &MatmulGradInput,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let product = Gemm {
        form: Form::Nn,
        a: Mat::tight(operands.read(0)?, op.rows, op.n_out),
        b: Mat::tight(operands.read(1)?, op.n_out, op.n_in),
        bias: None,
        sum: None,
        store: Store::Assign,
    };
    let dx = MatMut::tight(operands.write(0)?, op.rows, op.n_in);
    gemm(context, &product, dx)
}

/// `dweight (+)= dyᵀ · x`, cut into pieces and grains.
pub fn grad_weight(
    context: &CpuContext,
    op: &MatmulGradWeight,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let tokens = op.sum.tokens;
    let product = Gemm {
        form: Form::Tn,
        a: Mat::tight(operands.read(0)?, tokens, op.n_out),
        b: Mat::tight(operands.read(1)?, tokens, op.n_in),
        bias: None,
        sum: Some(op.sum),
        store: op.store,
    };
    let dweight = MatMut::tight(operands.write(0)?, op.n_out, op.n_in);
    gemm(context, &product, dweight)
}
