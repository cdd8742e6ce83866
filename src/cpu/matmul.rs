//! Linear layers on the CPU: the three matrix products over the blocked chain, of fused multiply-adds or of
//! tensor-core steps.

use super::arena::Operands;
use super::context::CpuContext;
use super::gemm::{Form, Gemm, Mat, MatMut, gemm};
use super::tensor_gemm::{Elements, TensorGemm, TensorMat, TensorSum, tensor_gemm};
use crate::error::DeviceError;
use crate::num::tensor_step::Kind;
use crate::num::tree::TokenSum;
use crate::op::Store;
use crate::op::matmul::{Matmul, MatmulGradInput, MatmulGradWeight};
use crate::shape::Math;

/// One product of either kind.
pub(super) struct Product<'a> {
    pub(super) math: Math,
    pub(super) form: Form,
    pub(super) a: Mat<'a>,
    pub(super) b: Mat<'a>,
    pub(super) bias: Option<&'a [f32]>,
    pub(super) sum: Option<TokenSum>,
    pub(super) store: Store,
}

impl<'a> Product<'a> {
    /// Computes it into `c`.
    ///
    /// # Errors
    /// Operands of the wrong size.
    pub(super) fn run(&self, context: &CpuContext, c: MatMut) -> Result<(), DeviceError> {
        let Some(kind) = Kind::of(self.math) else {
            let product = Gemm {
                form: self.form,
                a: self.a,
                b: self.b,
                bias: self.bias,
                sum: self.sum,
                store: self.store,
            };
            return gemm(context, &product, c);
        };
        let mat = |m: Mat<'a>| TensorMat {
            elements: Elements::F32(m.data),
            rows: m.rows,
            cols: m.cols,
            stride: m.stride,
        };
        let product = TensorGemm {
            kind,
            form: self.form,
            a: mat(self.a),
            b: mat(self.b),
            bias: self.bias,
            sum: self.sum.map_or(TensorSum::Chain, TensorSum::Tokens),
            store: self.store,
        };
        tensor_gemm(context, &product, c)
    }
}

/// `y = x · weightᵀ (+ bias)`.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn forward(
    context: &CpuContext,
    op: &Matmul,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let bias = match op.bias {
        true => Some(operands.read(2)?),
        false => None,
    };
    let product = Product {
        math: op.math,
        form: Form::Nt,
        a: Mat::tight(operands.read(0)?, op.rows, op.n_in),
        b: Mat::tight(operands.read(1)?, op.n_out, op.n_in),
        bias,
        sum: None,
        store: Store::Assign,
    };
    let y = MatMut::tight(operands.write(0)?, op.rows, op.n_out);
    product.run(context, y)
}

/// `dx = dy · weight`.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn grad_input(
    context: &CpuContext,
    op: &MatmulGradInput,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let product = Product {
        math: op.math,
        form: Form::Nn,
        a: Mat::tight(operands.read(0)?, op.rows, op.n_out),
        b: Mat::tight(operands.read(1)?, op.n_out, op.n_in),
        bias: None,
        sum: None,
        store: Store::Assign,
    };
    let dx = MatMut::tight(operands.write(0)?, op.rows, op.n_in);
    product.run(context, dx)
}

/// `dweight (+)= dyᵀ · x`, cut into pieces and grains.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn grad_weight(
    context: &CpuContext,
    op: &MatmulGradWeight,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let tokens = op.sum.tokens;
    let product = Product {
        math: op.math,
        form: Form::Tn,
        a: Mat::tight(operands.read(0)?, tokens, op.n_out),
        b: Mat::tight(operands.read(1)?, tokens, op.n_in),
        bias: None,
        sum: Some(op.sum),
        store: op.store,
    };
    let dweight = MatMut::tight(operands.write(0)?, op.n_out, op.n_in);
    product.run(context, dweight)
}
