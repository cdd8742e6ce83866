//! Operands that are stored narrower than binary32.
//!
//! Every op computes in binary32 from what is stored and rounds once to what it stores. So a call is run
//! with its narrow operands widened, which is exact, by the code that serves binary32, and what it has
//! written is rounded to the arena afterwards. The kernels themselves never see a narrow element.

use rayon::prelude::*;

use super::arena::Operands;
use super::context::CpuContext;
use crate::error::DeviceError;
use crate::num::element::{Bf16, Element, F16, narrow};
use crate::op::{Op, Operand};
use crate::shape::DType;

/// Elements that a task converts.
const BLOCK: usize = 1 << 14;

/// Runs `kernel` on the operands of a call, narrow ones as binary32.
///
/// # Errors
/// The kernel's own; nothing is stored then. A narrow operand whose place does not fit its type.
pub(super) fn run_widened(
    context: &CpuContext,
    op: &Op,
    operands: &mut Operands,
    kernel: impl FnOnce(&mut Operands) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    let signature = op.rule().signature();
    let is_narrow = |o: &Operand| matches!(o.dtype, DType::Bf16 | DType::F16);
    if !signature
        .reads
        .iter()
        .chain(&signature.writes)
        .any(is_narrow)
    {
        return kernel(operands);
    }
    let mut wide = Vec::new();
    for (index, operand) in signature.reads.iter().enumerate() {
        wide.push(match operand.dtype {
            DType::Bf16 => Some(widened::<Bf16>(context, operands.read(index)?)),
            DType::F16 => Some(widened::<F16>(context, operands.read(index)?)),
            _ => None,
        });
    }
    let mut stored = Vec::new();
    for (index, operand) in signature.writes.iter().enumerate() {
        stored.push(match operand.dtype {
            DType::Bf16 => Stored::Bf16(operands.write(index)?),
            DType::F16 => Stored::F16(operands.write(index)?),
            _ => Stored::Wide(operands.write(index)?),
        });
    }
    let mut buffers: Vec<Vec<f32>> = stored.iter().map(|s| s.widened(context)).collect();
    {
        let mut inside = operands.like();
        for (index, wide) in wide.iter().enumerate() {
            match wide {
                Some(values) => inside.push_read(bytemuck::cast_slice(values)),
                None => inside.push_read(operands.read(index)?),
            }
        }
        for (stored, buffer) in stored.iter_mut().zip(&mut buffers) {
            match stored {
                Stored::Wide(bytes) => inside.push_write(bytes),
                _ => inside.push_write(bytemuck::cast_slice_mut(buffer)),
            }
        }
        kernel(&mut inside)?;
    }
    for (stored, buffer) in stored.into_iter().zip(&buffers) {
        match stored {
            Stored::Bf16(elements) => rounded(context, elements, buffer),
            Stored::F16(elements) => rounded(context, elements, buffer),
            Stored::Wide(_) => {}
        }
    }
    Ok(())
}

/// A written operand in the arena.
enum Stored<'a> {
    Bf16(&'a mut [Bf16]),
    F16(&'a mut [F16]),
    /// Of a type that kernels write themselves.
    Wide(&'a mut [u8]),
}

impl Stored<'_> {
    /// What it holds now, so that what a kernel leaves alone keeps its value; empty for a wide one.
    fn widened(&self, context: &CpuContext) -> Vec<f32> {
        match self {
            Stored::Bf16(elements) => widened(context, elements),
            Stored::F16(elements) => widened(context, elements),
            Stored::Wide(_) => Vec::new(),
        }
    }
}

fn widened<E: Element>(context: &CpuContext, elements: &[E]) -> Vec<f32> {
    let mut values = vec![0.0; elements.len()];
    context.run(|| {
        let blocks = values.par_chunks_mut(BLOCK).zip(elements.par_chunks(BLOCK));
        blocks.for_each(|(values, elements)| {
            for (value, element) in values.iter_mut().zip(elements) {
                *value = element.to_f32();
            }
        });
    });
    values
}

fn rounded<E: Element>(context: &CpuContext, elements: &mut [E], values: &[f32]) {
    context.run(|| {
        let blocks = elements.par_chunks_mut(BLOCK).zip(values.par_chunks(BLOCK));
        blocks.for_each(|(elements, values)| narrow(elements, values));
    });
}
