//! The global gradient norm and the step's decision on the CPU.

use rayon::prelude::*;

use super::arena::Operands;
use super::context::CpuContext;
use super::rows::expect_len;
use super::simd::{SimdPath, Task, dispatch};
use crate::error::DeviceError;
use crate::num::lanes::square_sum_f64;
use crate::num::tree::TreeFold;
use crate::op::clip::{Clip, GradSquares, SQUARES_BLOCK};
use crate::op::step_values::{
    Dropped, Finite, LossScale, ReportWords, StepScalars, canonical_bits,
};

struct BlockSquares<'a> {
    block: &'a [f32],
}

impl Task for BlockSquares<'_> {
    type Out = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        square_sum_f64(self.block)
    }
}

/// The sum of squares of every block of the gradient arena.
pub fn squares(
    context: &CpuContext,
    op: &GradSquares,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let grad: &[f32] = operands.read(0)?;
    let partials: &mut [f64] = operands.write(0)?;
    expect_len("grad", op.elements, grad.len())?;
    expect_len("partials", op.partials(), partials.len())?;
    let path: SimdPath = context.path();
    context.run(|| {
        let blocks = grad.par_chunks(SQUARES_BLOCK).zip(partials.par_iter_mut());
        blocks.for_each(|(block, partial)| *partial = dispatch(path, BlockSquares { block }));
    });
    Ok(())
}

/// The report of the step.
pub fn clip(_context: &CpuContext, op: &Clip, operands: &mut Operands) -> Result<(), DeviceError> {
    let partials: &[f64] = operands.read(0)?;
    let loss: &[f32] = operands.read(1)?;
    let scalars: &[StepScalars] = operands.read(2)?;
    let report: &mut [ReportWords] = operands.write(0)?;
    expect_len("partials", op.partials, partials.len())?;
    expect_len("loss", 1, loss.len())?;
    expect_len("scalars", 1, scalars.len())?;
    expect_len("report", 1, report.len())?;
    let mut fold = TreeFold::new();
    for &p in partials {
        fold.push(p, |a, b| a + b);
    }
    let squares = fold.finish(|a, b| a + b).unwrap_or(0.0);
    let Some(scaling) = op.loss_scaling else {
        report[0] = decide(squares.sqrt(), loss[0], &scalars[0]);
        return Ok(());
    };
    let state: &mut [LossScale] = operands.write(1)?;
    expect_len("loss_scale", 1, state.len())?;
    let norm = squares.sqrt() / f64::from(state[0].scale);
    report[0] = ReportWords {
        loss_scale: state[0].scale.to_bits(),
        ..decide(norm, loss[0], &scalars[0])
    };
    state[0] = state[0].after(finite(report[0].dropped), scaling.growth_interval);
    Ok(())
}

/// Whether loss and norm of a step were finite, by why it was dropped.
fn finite(dropped: u32) -> Finite {
    let overflow = Dropped::NON_FINITE_LOSS | Dropped::NON_FINITE_NORM;
    match Dropped::from_bits_retain(dropped).intersects(overflow) {
        true => Finite::No,
        false => Finite::Yes,
    }
}

/// The clip coefficient and whether the step is applied, for the norm of gradients without loss scale.
pub fn decide(norm: f64, loss: f32, scalars: &StepScalars) -> ReportWords {
    let coefficient = (f64::from(scalars.max_norm) / (norm + 1e-6)).min(1.0);
    let mut dropped = Dropped::empty();
    dropped.set(Dropped::NON_FINITE_LOSS, !loss.is_finite());
    dropped.set(Dropped::NON_FINITE_NORM, !norm.is_finite());
    dropped.set(Dropped::SPIKE, norm > f64::from(scalars.spike_norm));
    ReportWords {
        loss: canonical_bits(loss),
        grad_norm: canonical_bits(norm as f32),
        clip_coefficient: canonical_bits(coefficient as f32),
        applied: u32::from(dropped.is_empty()),
        dropped: dropped.bits(),
        loss_scale: 0,
        reserved: [0; 2],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytemuck::Zeroable;

    fn scalars(max_norm: f32, spike_norm: f32) -> StepScalars {
        StepScalars {
            max_norm,
            spike_norm,
            ..StepScalars::zeroed()
        }
    }

    #[test]
    fn the_norm_clips_and_not_its_square() {
        let report = decide(4.0, 1.0, &scalars(2.0, f32::INFINITY));
        assert_eq!(f32::from_bits(report.grad_norm), 4.0);
        let coefficient = f32::from_bits(report.clip_coefficient);
        assert!((coefficient - 0.5).abs() < 1e-6, "{coefficient}");
    }

    #[test]
    fn a_norm_under_the_limit_or_no_limit_gives_exactly_one() {
        for max_norm in [5.0, f32::INFINITY] {
            let report = decide(4.0, 1.0, &scalars(max_norm, f32::INFINITY));
            assert_eq!(f32::from_bits(report.clip_coefficient), 1.0);
            assert_eq!(report.applied, 1);
        }
    }

    #[test]
    fn non_finite_values_and_spikes_drop_the_step_and_say_why() {
        let open = scalars(1.0, f32::INFINITY);
        let cases = [
            (decide(f64::NAN, 1.0, &open), Dropped::NON_FINITE_NORM),
            (decide(f64::INFINITY, 1.0, &open), Dropped::NON_FINITE_NORM),
            (decide(1.0, f32::NAN, &open), Dropped::NON_FINITE_LOSS),
            (decide(4.0, 1.0, &scalars(1.0, 3.9)), Dropped::SPIKE),
        ];
        for (report, why) in cases {
            assert_eq!((report.applied, report.dropped), (0, why.bits()));
        }
        assert_eq!(
            decide(4.0, 1.0, &scalars(1.0, 4.0)).applied,
            1,
            "the limit itself passes"
        );
    }
}
