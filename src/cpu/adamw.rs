//! AdamW over the whole parameter arena on the CPU.

use rayon::prelude::*;

use super::arena::Operands;
use super::context::CpuContext;
use super::rows::expect_len;
use super::simd::{Task, dispatch};
use crate::error::DeviceError;
use crate::op::adamw::AdamW;
use crate::op::step_values::{ReportWords, StepScalars};
use crate::shape::DType;

/// Elements a task takes.
const BLOCK: usize = 1 << 14;

struct Update<'a> {
    op: &'a AdamW,
    scalars: StepScalars,
    coefficient: f32,
    /// One over the loss scale that the gradients carry; exact, as the scale is a power of two.
    unscale: f32,
    /// Elements from the start of the block to which weight decay applies.
    decayed: usize,
    grad: &'a [f32],
    param: &'a mut [f32],
    moment1: &'a mut [f32],
    moment2: &'a mut [f32],
}

impl Task for Update<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let n = self.grad.len();
        let (op, s, coefficient) = (self.op, self.scalars, self.coefficient);
        let unscale = self.unscale;
        let grad = &self.grad[..n];
        let (p, m, v) = (
            &mut self.param[..n],
            &mut self.moment1[..n],
            &mut self.moment2[..n],
        );
        // Two loops, so that neither has a condition on the element.
        let split = self.decayed.min(n);
        for (range, decay) in [(0..split, s.decay), (split..n, 1.0)] {
            for i in range {
                let g = (grad[i] * unscale) * coefficient;
                let m1 = op.beta1.mul_add(m[i], op.one_minus_beta1 * g);
                let m2 = op.beta2.mul_add(v[i], (op.one_minus_beta2 * g) * g);
                let update =
                    (m1 * s.bias_correction1) / ((m2 * s.bias_correction2).sqrt() + op.eps);
                p[i] = (-s.lr).mul_add(update, p[i] * decay);
                m[i] = m1;
                v[i] = m2;
            }
        }
    }
}

/// One over the loss scale that the step's gradients carry.
fn unscale(op: &AdamW, report: &ReportWords) -> f32 {
    match op.math.scales_loss() {
        true => 1.0 / f32::from_bits(report.loss_scale),
        false => 1.0,
    }
}

/// `to = from`.
fn copy(to: &mut [f32], from: &[f32]) {
    let blocks = to.par_chunks_mut(BLOCK).zip(from.par_chunks(BLOCK));
    blocks.for_each(|(to, from)| to.copy_from_slice(from));
}

/// One step of AdamW, or nothing at all when the report says that the step is dropped.
pub fn update(
    context: &CpuContext,
    op: &AdamW,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let grad: &[f32] = operands.read(0)?;
    let scalars: &[StepScalars] = operands.read(1)?;
    let report: &[ReportWords] = operands.read(2)?;
    let param: &mut [f32] = operands.write(0)?;
    let moment1: &mut [f32] = operands.write(1)?;
    let moment2: &mut [f32] = operands.write(2)?;
    // Rounded to the shadow's own storage where the call stores it.
    let shadow: Option<&mut [f32]> = match op.math.storage() {
        DType::F32 => None,
        _ => Some(operands.write(3)?),
    };
    let lengths = [
        ("scalars", 1, scalars.len()),
        ("report", 1, report.len()),
        ("grad", op.elements, grad.len()),
        ("param", op.elements, param.len()),
        ("moment1", op.elements, moment1.len()),
        ("moment2", op.elements, moment2.len()),
        (
            "shadow",
            op.shadowed().len(),
            shadow.as_ref().map_or(op.shadowed().len(), |s| s.len()),
        ),
    ];
    for (operand, expected, found) in lengths {
        expect_len(operand, expected, found)?;
    }
    let (scalars, report) = (scalars[0], report[0]);
    if report.applied == 0 {
        return Ok(());
    }
    let coefficient = f32::from_bits(report.clip_coefficient);
    let unscale = unscale(op, &report);
    let path = context.path();
    context.run(|| {
        let blocks = grad.par_chunks(BLOCK).zip(param.par_chunks_mut(BLOCK)).zip(
            moment1
                .par_chunks_mut(BLOCK)
                .zip(moment2.par_chunks_mut(BLOCK)),
        );
        blocks
            .enumerate()
            .for_each(|(index, ((grad, param), (moment1, moment2)))| {
                let decayed = op.decayed.saturating_sub(index * BLOCK);
                let task = Update {
                    op,
                    scalars,
                    coefficient,
                    unscale,
                    decayed,
                    grad,
                    param,
                    moment1,
                    moment2,
                };
                dispatch(path, task);
            });
        if let Some(shadow) = shadow {
            copy(shadow, &param[op.shadowed()]);
        }
    });
    Ok(())
}
