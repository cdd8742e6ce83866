//! Uniform numbers from Philox blocks.

use super::philox::Philox;

/// 2^-23.
const STEP: f32 = f32::from_bits((127 - 23) << 23);

/// Fills `out` with numbers that are uniform in `[-bound, bound)`: element i comes from the upper 24
/// bits of word i mod 4 of block i / 4, so the product with `bound` is the only rounding.
pub fn fill_uniform(out: &mut [f32], philox: Philox, bound: f32) {
    for (index, quad) in (0..).zip(out.chunks_mut(4)) {
        for (x, word) in quad.iter_mut().zip(philox.block(index)) {
            *x = ((word >> 8) as f32 * STEP - 1.0) * bound;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::philox::Purpose;
    use super::*;

    #[test]
    fn numbers_fill_their_interval_evenly_and_a_longer_slice_begins_as_a_shorter_one() {
        let philox = Philox::new(7, Purpose::Init, 3);
        let mut x = vec![f32::NAN; 100_001];
        fill_uniform(&mut x, philox, 0.25);
        assert!(x.iter().all(|x| (-0.25..0.25).contains(x)));
        let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / x.len() as f64;
        assert!(mean.abs() < 0.002, "{mean}");
        let squares = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>();
        let variance = squares / x.len() as f64 * 48.0;
        assert!((variance - 1.0).abs() < 0.02, "{variance} of 1");
        let mut short = vec![0.0; 7];
        fill_uniform(&mut short, philox, 0.25);
        assert_eq!(short, x[..7]);
    }
}
