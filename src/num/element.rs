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
pub trait Element: Pod + Send + Sync {
    /// The value in binary32, exactly.
    fn to_f32(self) -> f32;

    /// The element nearest to `x`; ties to even, a NaN is the canonical one.
    fn from_f32(x: f32) -> Self;
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

    #[test]
    fn a_row_is_narrowed_element_by_element() {
        let mut row = [Bf16(7); 3];
        narrow(&mut row, &[1.0, -2.0, 1.0 + f32::EPSILON]);
        assert_eq!(row.map(Element::to_f32), [1.0, -2.0, 1.0]);
        assert_eq!(F16::from_f32(f32::NAN), F16(0x7e00));
        assert_eq!(f32::from_f32(1e-30).to_f32(), 1e-30);
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
