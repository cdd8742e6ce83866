//! Standard normal numbers from Philox blocks, with the contract's own `log`, `sqrt` and `sin_cos`
//! (Box and Muller, "A note on the generation of random normal deviates", 1958).

use rayon::prelude::*;

use super::elementary::{log, sin_cos};
use super::philox::Philox;

/// Elements that one thread draws at a time; a multiple of the four of a block.
const CHUNK: usize = 1 << 14;

/// 2^-32.
const STEP: f32 = f32::from_bits((127 - 32) << 23);
/// 2^-33.
const HALF_STEP: f32 = f32::from_bits((127 - 33) << 23);
/// 2π · 2^-32.
const ANGLE_STEP: f32 = f32::from_bits(0x30c9_0fdb);

/// Two independent standard normal numbers from two words. The radius comes from a uniform number in
/// `[2^-33, 1]`, so its logarithm is finite and no number is beyond 6.77.
fn pair(radius: u32, angle: u32) -> [f32; 2] {
    let uniform = (radius as f32).mul_add(STEP, HALF_STEP);
    let length = (-2.0 * log(uniform)).sqrt();
    let (sine, cosine) = sin_cos(angle as f32 * ANGLE_STEP);
    [length * cosine, length * sine]
}

/// Four independent standard normal numbers from one block, always finite.
pub fn normal4(block: [u32; 4]) -> [f32; 4] {
    let ([a, b], [c, d]) = (pair(block[0], block[1]), pair(block[2], block[3]));
    [a, b, c, d]
}

/// Fills `out` with normal numbers of mean 0 and standard deviation `std`: element i is number i mod 4 of
/// block i / 4, so a longer slice begins as a shorter one does, and threads decide no bit.
pub fn fill_normal(out: &mut [f32], philox: Philox, std: f32) {
    let chunks = out.par_chunks_mut(CHUNK).enumerate();
    chunks.for_each(|(chunk, out)| fill_from((chunk * (CHUNK / 4)) as u64, out, philox, std));
}

/// Fills `out` with the numbers from block `first` on.
fn fill_from(first: u64, out: &mut [f32], philox: Philox, std: f32) {
    for (index, quad) in (first..).zip(out.chunks_mut(4)) {
        let numbers = normal4(philox.block(index));
        for (x, number) in quad.iter_mut().zip(numbers) {
            *x = number * std;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::philox::Purpose;
    use super::*;

    fn million(std: f32) -> Vec<f32> {
        let mut x = vec![0.0; 1_000_000];
        fill_normal(&mut x, Philox::new(1, Purpose::Init, 0), std);
        x
    }

    /// BLAKE3 of the little-endian bytes.
    fn digest(numbers: &[f32]) -> String {
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        blake3::hash(&bytes).to_hex().to_string()
    }

    #[test]
    fn the_first_million_have_known_bits() {
        let mut numbers = million(1.0);
        assert_eq!(
            digest(&numbers).as_str(),
            "e3eba49efa13a0774c24df28194a7ac5b425824e70751f9dceeca595d30a1b12"
        );
        numbers[999_999] = numbers[999_999].next_up();
        assert_ne!(digest(&numbers).as_str(), digest(&million(1.0)).as_str());
    }

    #[test]
    fn chunks_drawn_by_many_threads_are_the_serial_order() {
        let philox = Philox::new(5, Purpose::Init, 9);
        for length in [0, 1, CHUNK - 1, CHUNK, CHUNK + 5, 7 * CHUNK + 3] {
            let (mut serial, mut drawn) = (vec![0.0f32; length], vec![1.0f32; length]);
            fill_from(0, &mut serial, philox, 0.02);
            fill_normal(&mut drawn, philox, 0.02);
            let bits = |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&drawn), bits(&serial), "{length}");
        }
    }

    #[test]
    fn moments_and_tails_are_those_of_the_normal_law() {
        let x = million(1.0);
        let n = x.len() as f64;
        let moment = |p: i32| x.iter().map(|&v| f64::from(v).powi(p)).sum::<f64>() / n;
        // Each bound is five standard errors: sqrt(1/n), sqrt(2/n), sqrt(15/n), sqrt(96/n).
        assert!(moment(1).abs() < 0.005, "mean {}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.0071, "variance {}", moment(2));
        assert!(moment(3).abs() < 0.0194, "third moment {}", moment(3));
        assert!((moment(4) - 3.0).abs() < 0.049, "fourth {}", moment(4));
        // A fraction 0.0026998 lies beyond three; five standard errors are 0.00026.
        let beyond = x.iter().filter(|v| v.abs() > 3.0).count() as f64 / n;
        assert!((beyond - 0.002_699_8).abs() < 0.000_26, "tail {beyond}");
    }

    #[test]
    fn neighbours_are_uncorrelated() {
        let x = million(1.0);
        for lag in 1..=4 {
            let products = x.iter().zip(&x[lag..]).map(|(&a, &b)| f64::from(a * b));
            let mean = products.sum::<f64>() / (x.len() - lag) as f64;
            assert!(mean.abs() < 0.005, "lag {lag}: {mean}");
        }
    }

    #[test]
    fn extreme_words_give_finite_numbers() {
        let words = [0, 1, 1 << 30, 1 << 31, 3 << 30, u32::MAX - 1, u32::MAX];
        for &radius in &words {
            for &angle in &words {
                for v in normal4([radius, angle, angle, radius]) {
                    assert!(v.abs() < 6.77, "{radius} {angle}: {v}");
                }
            }
        }
    }

    #[test]
    fn a_longer_slice_begins_as_a_shorter_one_and_std_scales() {
        let philox = Philox::new(7, Purpose::Init, 3);
        let (mut short, mut long) = ([0.0; 7], [0.0; 13]);
        fill_normal(&mut short, philox, 1.0);
        fill_normal(&mut long, philox, 1.0);
        assert_eq!(short, long[..7]);
        let mut scaled = [0.0; 7];
        fill_normal(&mut scaled, philox, 0.02);
        assert_eq!(scaled, short.map(|v| v * 0.02));
    }
}
