//! Elements as tensors store them: binary32, bf16 and f16, and their way to binary32 and back.
//!
//! Widening is exact and narrowing rounds once, to nearest with ties to even, so a computation in binary32
//! between the two has the bits of its formula.

use bytemuck::{Pod, Zeroable};

use super::round::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use crate::shape::DType;

/// A bf16 as it is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct Bf16(pub u16);

/// An f16 as it is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct F16(pub u16);

/// A floating-point element of a tensor.
///
/// The functions over rows take scratch that the narrow types use; binary32 works in place.
pub trait Element: Pod + Send + Sync {
    /// The value in binary32, exactly.
    fn to_f32(self) -> f32;

    /// The element nearest to `x`; ties to even, a NaN is the canonical one.
    fn from_f32(x: f32) -> Self;

    /// The values of a row in binary32.
    #[inline(always)]
    fn view<'a>(row: &'a [Self], scratch: &'a mut Vec<f32>) -> &'a [f32] {
        scratch.clear();
        scratch.extend(row.iter().map(|x| x.to_f32()));
        scratch
    }

    /// Writes a row: `write` gets binary32 of the row's length, whose contents it must not read.
    #[inline(always)]
    fn fill(row: &mut [Self], scratch: &mut Vec<f32>, write: impl FnOnce(&mut [f32])) {
        scratch.clear();
        scratch.resize(row.len(), 0.0);
        write(scratch);
        narrow(row, scratch);
    }

    /// Changes a row in place.
    #[inline(always)]
    fn edit(row: &mut [Self], scratch: &mut Vec<f32>, change: impl FnOnce(&mut [f32])) {
        scratch.clear();
        scratch.extend(row.iter().map(|x| x.to_f32()));
        change(scratch);
        narrow(row, scratch);
    }
}

/// `row[i]` becomes the element nearest to `values[i]`.
#[inline(always)]
pub fn narrow<E: Element>(row: &mut [E], values: &[f32]) {
    for (x, &value) in row.iter_mut().zip(values) {
        *x = E::from_f32(value);
    }
}

impl Element for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }

    #[inline(always)]
    fn view<'a>(row: &'a [f32], _: &'a mut Vec<f32>) -> &'a [f32] {
        row
    }

    #[inline(always)]
    fn fill(row: &mut [f32], _: &mut Vec<f32>, write: impl FnOnce(&mut [f32])) {
        write(row);
    }

    #[inline(always)]
    fn edit(row: &mut [f32], _: &mut Vec<f32>, change: impl FnOnce(&mut [f32])) {
        change(row);
    }
}

impl Element for Bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        bf16_to_f32(self.0)
    }

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        Bf16(f32_to_bf16(x))
    }
}

impl Element for F16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16_to_f32(self.0)
    }

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        F16(f32_to_f16(x))
    }
}

/// The bytes of `values` stored as `dtype`; `None` unless that is a float of at most 32 bits.
pub fn encode(dtype: DType, values: &[f32]) -> Option<Vec<u8>> {
    fn bytes<E: Element>(values: &[f32]) -> Vec<u8> {
        let elements: Vec<E> = values.iter().map(|&x| E::from_f32(x)).collect();
        bytemuck::cast_slice(&elements).to_vec()
    }
    match dtype {
        DType::F32 => Some(bytes::<f32>(values)),
        DType::Bf16 => Some(bytes::<Bf16>(values)),
        DType::F16 => Some(bytes::<F16>(values)),
        _ => None,
    }
}

/// The values of `bytes` stored as `dtype`; `None` unless that is a float of at most 32 bits. A rest
/// shorter than an element is left out.
pub fn decode(dtype: DType, bytes: &[u8]) -> Option<Vec<f32>> {
    fn values<E: Element>(bytes: &[u8]) -> Vec<f32> {
        let parts = bytes.chunks_exact(size_of::<E>());
        parts
            .map(|part| bytemuck::pod_read_unaligned::<E>(part).to_f32())
            .collect()
    }
    match dtype {
        DType::F32 => Some(values::<f32>(bytes)),
        DType::Bf16 => Some(values::<Bf16>(bytes)),
        DType::F16 => Some(values::<F16>(bytes)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `edit` by a doubling and `fill` by a count, on three elements.
    fn rows<E: Element>() -> [Vec<f32>; 3] {
        let mut scratch = vec![7.0; 9];
        let mut row = [1.5, -0.25, 3.0].map(E::from_f32);
        let seen = E::view(&row, &mut scratch).to_vec();
        E::edit(&mut row, &mut scratch, |x| {
            x.iter_mut().for_each(|x| *x *= 2.0);
        });
        let edited = row.map(E::to_f32).to_vec();
        E::fill(&mut row, &mut scratch, |x| {
            assert_eq!(x.len(), 3);
            for (i, x) in x.iter_mut().enumerate() {
                *x = i as f32;
            }
        });
        [seen, edited, row.map(E::to_f32).to_vec()]
    }

    #[test]
    fn rows_are_seen_changed_and_written_in_every_storage() {
        let expected = [
            vec![1.5, -0.25, 3.0],
            vec![3.0, -0.5, 6.0],
            vec![0.0, 1.0, 2.0],
        ];
        assert_eq!(rows::<f32>(), expected);
        assert_eq!(rows::<Bf16>(), expected);
        assert_eq!(rows::<F16>(), expected);
    }

    #[test]
    fn bytes_and_values_are_each_others_inverse_after_one_rounding() {
        let values = [1.0, -2.5, 1e-3, 300.125];
        for (dtype, size) in [(DType::F32, 4), (DType::Bf16, 2), (DType::F16, 2)] {
            let bytes = encode(dtype, &values).expect("a float");
            assert_eq!(bytes.len(), 4 * size);
            let back = decode(dtype, &bytes).expect("a float");
            assert_eq!(encode(dtype, &back), Some(bytes));
            assert_eq!(back == values, dtype == DType::F32);
            assert_eq!(back[..2], values[..2]);
        }
        assert_eq!(encode(DType::I32, &values), None);
        assert_eq!(decode(DType::F64, &[0; 8]), None);
    }
}
