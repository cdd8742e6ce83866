//! Weights stored as NF4, back as numbers, on the CPU.

use rayon::prelude::*;

use super::arena::Operands;
use super::context::CpuContext;
use super::rows::expect_len;
use crate::error::DeviceError;
use crate::num::nf4::{BLOCK, blocks, dequantise_block, packed_bytes};
use crate::op::nf4::Dequantise;

/// Blocks a task takes.
const TASK_BLOCKS: usize = 256;

/// `weight`: each code's value times its block's maximum.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn dequantise(
    context: &CpuContext,
    op: &Dequantise,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let packed: &[u8] = operands.read(0)?;
    let maxima: &[f32] = operands.read(1)?;
    let weight: &mut [f32] = operands.write(0)?;
    expect_len("packed", packed_bytes(op.elements), packed.len())?;
    expect_len("maxima", blocks(op.elements), maxima.len())?;
    expect_len("weight", op.elements, weight.len())?;
    context.run(|| {
        let tasks = weight
            .par_chunks_mut(TASK_BLOCKS * BLOCK)
            .zip(packed.par_chunks(TASK_BLOCKS * BLOCK / 2))
            .zip(maxima.par_chunks(TASK_BLOCKS));
        tasks.for_each(|((weight, packed), maxima)| {
            let blocks = weight.chunks_mut(BLOCK).zip(packed.chunks(BLOCK / 2));
            for ((block, bytes), &maximum) in blocks.zip(maxima) {
                dequantise_block(bytes, maximum, block);
            }
        });
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::cpu::simd::SimdPath;
    use crate::io::tensors::TensorFile;
    use crate::num::nf4::quantise;
    use crate::shape::Math;

    /// A projection of the recorded base and its shape.
    fn shapes() -> impl Iterator<Item = (String, [usize; 2])> {
        let layer = [
            ("self_attn.q_proj", [128, 64]),
            ("self_attn.k_proj", [64, 64]),
            ("self_attn.v_proj", [64, 64]),
            ("self_attn.o_proj", [64, 128]),
            ("mlp.gate_proj", [128, 64]),
            ("mlp.up_proj", [128, 64]),
            ("mlp.down_proj", [64, 128]),
        ];
        (0..2).flat_map(move |i| layer.map(|(name, s)| (format!("model.layers.{i}.{name}"), s)))
    }

    fn open(file: &str) -> TensorFile {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/qlora-nf4-all");
        TensorFile::open(&root.join(file)).expect("the fixture opens")
    }

    fn run(packed: &[u8], maxima: &[f32], elements: usize) -> Result<Vec<f32>, DeviceError> {
        let context = CpuContext::new(SimdPath::Scalar, 2)?;
        let op = Dequantise {
            elements,
            math: Math::F32,
        };
        let mut weight = vec![f32::NAN; elements];
        {
            let mut operands = Operands::of("nf4_dequantise");
            operands.push_read(packed);
            operands.push_read(bytemuck::cast_slice(maxima));
            operands.push_write(bytemuck::cast_slice_mut(&mut weight));
            dequantise(&context, &op, &mut operands)?;
        }
        Ok(weight)
    }

    #[test]
    fn bytes_maxima_and_values_are_those_of_bitsandbytes() {
        let (base, record) = (open("base/model.safetensors"), open("nf4.safetensors"));
        for (name, shape) in shapes() {
            let weight = base.read_f32(&format!("{name}.weight"), &shape).unwrap();
            let elements = weight.len();
            let packed = quantise(&weight);
            let bytes = [packed_bytes(elements)];
            let bytes = record.read_u8(&format!("{name}.nf4"), &bytes).unwrap();
            let maxima = [blocks(elements)];
            let maxima = record.read_f32(&format!("{name}.absmax"), &maxima).unwrap();
            assert_eq!(packed.bytes, bytes, "{name}");
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&packed.maxima), bits(&maxima), "{name}");
            let values = record.read_f32(&format!("{name}.dequant"), &shape).unwrap();
            let found = run(&bytes, &maxima, elements).unwrap();
            assert_eq!(bits(&found), bits(&values), "{name}");
        }
    }

    #[test]
    fn tails_and_many_tasks_have_the_values_of_their_blocks() {
        for elements in [1, 63, 64, 65, 1 << 14, (1 << 15) + 129] {
            let source: Vec<f32> = (0..elements).map(|i| (i as f32 * 0.37).sin()).collect();
            let packed = quantise(&source);
            let found = run(&packed.bytes, &packed.maxima, elements).unwrap();
            for (i, x) in found.iter().enumerate() {
                let byte = packed.bytes[i / 2];
                let code = if i % 2 == 0 { byte >> 4 } else { byte & 15 };
                let value = crate::num::nf4::CODE[usize::from(code)];
                assert_eq!(*x, value * packed.maxima[i / BLOCK], "{i} of {elements}");
            }
        }
    }

    #[test]
    fn operands_of_another_size_are_refused() {
        let refused = run(&[0; 33], &[1.0], 64).unwrap_err();
        assert!(matches!(
            refused,
            DeviceError::OperandSize {
                operand: "packed",
                ..
            }
        ));
        let refused = run(&[0; 32], &[1.0, 1.0], 64).unwrap_err();
        assert!(matches!(
            refused,
            DeviceError::OperandSize {
                operand: "maxima",
                ..
            }
        ));
    }
}
