//! The residual stream that every family has: a sublayer's output is added by the norm after it.

use crate::op::Slot;
use crate::op::rms_norm::RmsNorm;
use crate::program::ProgramBuilder;

/// The residual stream on its way through the layers: what the next norm adds.
pub(super) struct Stream {
    pub residual: Slot,
    pub delta: Option<Slot>,
}

/// What a norm over the stream is given.
pub(super) struct Norm<'a> {
    pub weight: Slot,
    pub name: &'a str,
    pub rows: usize,
    pub d_model: usize,
    pub eps: f64,
}

impl Stream {
    /// Adds what the last sublayer left and gives the norm of the sum, [rows, d_model].
    pub fn norm(&mut self, program: &mut ProgramBuilder, norm: &Norm) -> Slot {
        let (name, matrix) = (norm.name, [norm.rows, norm.d_model]);
        let op = RmsNorm {
            rows: norm.rows,
            d_model: norm.d_model,
            eps: norm.eps as f32,
            residual: self.delta.is_some(),
            math: program.math,
        };
        let h = program.narrow_activation(name, matrix);
        let rstd = program.activation(format!("{name}.rstd"), [norm.rows]);
        match self.delta.take() {
            None => program.call(op, vec![self.residual, norm.weight], vec![h, rstd]),
            Some(delta) => {
                let r = program.activation(format!("{name}.residual"), matrix);
                let reads = vec![self.residual, delta, norm.weight];
                program.call(op, reads, vec![r, h, rstd]);
                self.residual = r;
            }
        }
        h
    }
}
