//! NF4: four bits a weight, with one f32 maximum for each block of 64.
//!
//! The code's sixteen values are quantiles of the normal distribution (Dettmers et al., QLoRA, 2023,
//! appendix E). Bytes, maxima and values are those of bitsandbytes' reference in f32, to the last bit.

use rayon::prelude::*;

use super::nf4_double::Nested;

/// Blocks that a task quantises.
const TASK_BLOCKS: usize = 256;

/// Elements that share a maximum.
pub const BLOCK: usize = 64;

/// What the four-bit codes stand for, ascending.
pub const CODE: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The least maximum that is divided by.
pub(super) const LEAST_MAXIMUM: f32 = 1e-38;

/// A quantised tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Packed {
    /// Two codes a byte, the earlier element in the upper half; the half after an odd end is the code of zero.
    pub bytes: Vec<u8>,
    /// The largest magnitude of each block; the last block may be shorter.
    pub maxima: Vec<f32>,
}

/// How the block maxima are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Quantisation {
    /// As they are.
    #[default]
    Once,
    /// As what eight-bit codes stand for: double quantisation.
    Double,
}

impl Quantisation {
    /// The codes of a tensor, row-major, with the block maxima that they are to be multiplied by.
    pub fn pack(self, values: &[f32]) -> Packed {
        let mut packed = quantise(values);
        if self == Quantisation::Double {
            packed.maxima = Nested::of(&packed.maxima).restored();
        }
        packed
    }
}

/// Bytes that `elements` codes take.
pub const fn packed_bytes(elements: usize) -> usize {
    elements.div_ceil(2)
}

/// Blocks of `elements` elements, the last perhaps shorter.
pub const fn blocks(elements: usize) -> usize {
    elements.div_ceil(BLOCK)
}

/// Quantises a tensor, row-major: a value over its block's largest magnitude becomes the nearest code, and where it
/// is the middle between two, rounded to f32, the lower one. In whole blocks it is multiplied by the reciprocal, in a
/// shorter last one divided, each operation rounded to f32.
pub fn quantise(values: &[f32]) -> Packed {
    let mut packed = Packed {
        bytes: vec![0; packed_bytes(values.len())],
        maxima: vec![0.0; blocks(values.len())],
    };
    // A block is even, so that no byte has codes of two blocks.
    let codes = packed.bytes.par_chunks_mut(BLOCK / 2);
    let blocks = values.par_chunks(BLOCK).zip(codes).zip(&mut packed.maxima);
    blocks
        .with_min_len(TASK_BLOCKS)
        .for_each(|((block, codes), maximum)| *maximum = quantise_block(block, codes));
    packed
}

/// Writes the codes of a block and gives its maximum.
fn quantise_block(block: &[f32], codes: &mut [u8]) -> f32 {
    let largest = largest_magnitude(block.iter().copied());
    if block.len() == BLOCK {
        let scale = 1.0 / largest.max(LEAST_MAXIMUM);
        put_codes(block, codes, |x| x * scale);
        return largest;
    }
    let largest = largest_magnitude([LEAST_MAXIMUM, largest]);
    put_codes(block, codes, |x| x / largest);
    largest
}

fn put_codes(block: &[f32], codes: &mut [u8], scaled: impl Fn(f32) -> f32) {
    for (byte, pair) in codes.iter_mut().zip(block.chunks(2)) {
        let upper = nearest(scaled(pair[0]));
        let lower = nearest(pair.get(1).map_or(0.0, |&x| scaled(x)));
        *byte = upper << 4 | lower;
    }
}

/// The values of one block or of its first elements: each code's value times the block's maximum,
/// rounded to f32. Elements of `out` beyond the codes in `bytes` are left alone.
#[inline(always)]
pub fn dequantise_block(bytes: &[u8], maximum: f32, out: &mut [f32]) {
    for (pair, byte) in out.chunks_mut(2).zip(bytes) {
        pair[0] = CODE[usize::from(byte >> 4)] * maximum;
        if let Some(second) = pair.get_mut(1) {
            *second = CODE[usize::from(byte & 15)] * maximum;
        }
    }
}

/// The largest magnitude; a NaN stays one.
pub(super) fn largest_magnitude(values: impl IntoIterator<Item = f32>) -> f32 {
    let larger = |max: f32, x: f32| if max.is_nan() || max > x { max } else { x };
    values.into_iter().map(f32::abs).fold(0.0, larger)
}

/// The middles between neighbouring values of the code, rounded to f32.
const MIDDLES: [f32; 15] = {
    let mut middles = [0.0; 15];
    let mut i = 0;
    while i < middles.len() {
        middles[i] = (CODE[i] + CODE[i + 1]) / 2.0;
        i += 1;
    }
    middles
};

/// How many of the middles are less than `x`; none for a NaN.
fn nearest(x: f32) -> u8 {
    MIDDLES.iter().map(|&middle| u8::from(middle < x)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(packed: &Packed, elements: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; elements];
        let blocks = out.chunks_mut(BLOCK).zip(packed.bytes.chunks(BLOCK / 2));
        for ((block, bytes), &maximum) in blocks.zip(&packed.maxima) {
            dequantise_block(bytes, maximum, block);
        }
        out
    }

    #[test]
    fn the_values_of_the_code_are_those_of_the_reference() {
        // Written as bitsandbytes writes them, in f64.
        let reference: [f64; 16] = [
            -1.0,
            -0.6961928009986877,
            -0.5250730514526367,
            -0.39491748809814453,
            -0.28444138169288635,
            -0.18477343022823334,
            -0.09105003625154495,
            0.0,
            0.07958029955625534,
            0.16093020141124725,
            0.24611230194568634,
            0.33791524171829224,
            0.44070982933044434,
            0.5626170039176941,
            0.7229568362236023,
            1.0,
        ];
        assert_eq!(CODE.map(f64::from), reference);
    }

    #[test]
    fn a_code_times_a_power_of_two_comes_back() {
        let all: Vec<f32> = CODE.iter().map(|c| c * 0.25).collect();
        let packed = quantise(&all);
        assert_eq!(packed.maxima, [0.25]);
        assert_eq!(packed.bytes[..2], [0x01, 0x23], "the earlier is above");
        assert_eq!(values(&packed, 16), all);
    }

    #[test]
    fn tails_have_a_block_and_a_half_byte_of_their_own() {
        for n in [0, 1, 2, 63, 64, 65, 127, 128, 129] {
            let source: Vec<f32> = (0..n).map(|i| (i as f32 - 40.0) * 0.01).collect();
            let packed = quantise(&source);
            assert_eq!(packed.bytes.len(), packed_bytes(n));
            assert_eq!(packed.maxima.len(), blocks(n));
            let found = values(&packed, n);
            for (block, maximum) in source.chunks(BLOCK).zip(&packed.maxima) {
                let largest = block.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
                assert_eq!(largest, *maximum);
            }
            for (i, (x, y)) in source.iter().zip(&found).enumerate() {
                let most = 0.16 * packed.maxima[i / BLOCK];
                assert!((x - y).abs() <= most, "element {i} of {n}: {x} became {y}");
            }
        }
        assert_eq!(quantise(&[3.0]).bytes, [0xf7]);
    }

    #[test]
    fn zeros_and_values_that_are_not_numbers_keep_to_the_formula() {
        let zeros = quantise(&[0.0; BLOCK + 3]);
        assert!(zeros.bytes.iter().all(|&byte| byte == 0x77));
        assert_eq!(zeros.maxima, [0.0, LEAST_MAXIMUM]);
        assert_eq!(values(&zeros, BLOCK + 3), [0.0; BLOCK + 3]);
        let nan = quantise(&[1.0, f32::NAN, 2.0]);
        assert!(nan.maxima[0].is_nan());
    }
}
