//! The softmax of a row of logits that are stored in bf16 or f16.
//!
//! It is the online softmax of [`super::softmax`] with the factor of a score of one term: for each tile of
//! [`LOGIT_TILE`] logits in ascending order the reference rises where a logit would pass it, and 256 lanes take the
//! weights. A logit so has one exponential, and a kernel that keeps the weights, rounded, needs no second one for
//! the gradient.

use super::elementary::{log, weight};
use super::lanes::{LANES, fold_lanes};
use super::softmax::{raise, score_weight};
use crate::shape::DType;

/// Logits of a tile.
pub const LOGIT_TILE: usize = 8192;
/// From a logit to units of 128 doublings: `log2(e) / 128`.
pub const LOGIT_FACTOR: f32 = (std::f64::consts::LOG2_E / 128.0) as f32;
/// From units of 128 doublings to the natural logarithm: `128 · log(2)`.
const NATS: f32 = (std::f64::consts::LN_2 * 128.0) as f32;
/// A row's reference before any logit. No product of a finite logit is as low, so logits of minus infinity alone
/// leave it as it is.
const FIRST_REFERENCE: f32 = f32::MIN;

/// The references of a row's tiles as they rise.
#[derive(Clone, Copy, Debug)]
pub struct References {
    reference: f32,
}

impl References {
    /// Before the first tile.
    pub fn new() -> Self {
        References {
            reference: FIRST_REFERENCE,
        }
    }

    /// Takes the next tile: `lanes`, the sums so far, move to the reference beside which its weights are, which is
    /// given.
    #[inline(always)]
    pub fn take(&mut self, tile: &[f32], lanes: &mut [f32]) -> f32 {
        let top = greatest_or_nan(tile);
        if let Some(rescale) = raise(&mut self.reference, top, LOGIT_FACTOR) {
            for lane in lanes {
                *lane = lane.mul_add(rescale.factor, rescale.addend);
            }
        }
        self.reference
    }
}

impl Default for References {
    fn default() -> Self {
        References::new()
    }
}

/// The greatest of some logits, a NaN if one is.
#[inline(always)]
fn greatest_or_nan(tile: &[f32]) -> f32 {
    const WIDTH: usize = 32;
    let greater = |a: f32, x: f32| if x > a || x.is_nan() { x } else { a };
    let mut lanes = [f32::NEG_INFINITY; WIDTH];
    let (chunks, rest) = tile.as_chunks::<WIDTH>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = greater(*lane, x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = greater(*lane, x);
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, greater)
}

/// What a row of logits comes to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitRow {
    /// Beside which the weights of the sum are.
    pub reference: f32,
    /// The sum of all weights.
    pub sum: f32,
}

impl LogitRow {
    /// The row's reference and sum.
    #[inline(always)]
    pub fn of(logits: &[f32]) -> Self {
        let mut references = References::new();
        let mut lanes = [0.0_f32; LANES];
        for tile in logits.chunks(LOGIT_TILE) {
            let reference = references.take(tile, &mut lanes);
            let (chunks, rest) = tile.as_chunks::<LANES>();
            for chunk in chunks {
                for (lane, &x) in lanes.iter_mut().zip(chunk) {
                    *lane += score_weight(x, LOGIT_FACTOR, reference);
                }
            }
            for (lane, &x) in lanes.iter_mut().zip(rest) {
                *lane += score_weight(x, LOGIT_FACTOR, reference);
            }
        }
        LogitRow {
            reference: references.reference,
            sum: fold_lanes(lanes),
        }
    }

    /// Whether the row has a softmax: no logit is a NaN or plus infinity, and not all are minus infinity. Finite
    /// logits above 2^30 may leave no weight either, where rounding the reference has lost 128 doublings.
    pub fn is_ordinary(&self) -> bool {
        self.sum > 0.0
    }

    /// `-log` of the probability of the row's logit `x`, not below `+0.0`; a NaN where there is no softmax.
    pub fn surprise(&self, x: f32) -> f32 {
        if !self.is_ordinary() {
            return f32::NAN;
        }
        let distance = (-x).mul_add(LOGIT_FACTOR, self.reference);
        let y = distance.mul_add(NATS, log(0.5 * self.sum));
        if y > 0.0 { y } else { 0.0 }
    }

    /// The probability of the row's logit `x`, not rounded to H.
    pub fn probability(&self, x: f32) -> f32 {
        score_weight(x, LOGIT_FACTOR, self.reference) * (1.0 / self.sum)
    }

    /// `factor` over the sum, times `scale`: what a tile's rounded weights are multiplied by, but for
    /// [`LogitRow::tile_factor`]. A NaN where there is no softmax.
    pub fn factor(&self, factor: f32, scale: f32) -> f32 {
        if !self.is_ordinary() {
            return f32::NAN;
        }
        (factor * (1.0 / self.sum)) * scale
    }

    /// What weights beside a tile's `reference` are to those beside the row's: a power of two.
    pub fn tile_factor(&self, reference: f32) -> f32 {
        0.5 * weight(self.reference - reference)
    }
}

/// What weights are multiplied by before they are rounded to `storage`, so that those of small probabilities are
/// not subnormal there.
pub fn lift(storage: DType) -> f32 {
    match storage {
        DType::F16 => 16_384.0,
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Logits as a model gives them: most near zero, few far above, as bf16.
    fn logits(n: usize, spread: f32, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 40) as f32 / (1_u64 << 24) as f32 - 0.5
        };
        let bf16 = |x: f32| f32::from_bits(x.to_bits() & 0xffff_0000);
        (0..n)
            .map(|_| bf16((next() + next() + next() + next()) * spread))
            .collect()
    }

    fn exact_lse(logits: &[f32]) -> f64 {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits
            .iter()
            .map(|&x| (f64::from(x) - f64::from(max)).exp())
            .sum();
        f64::from(max) + sum.ln()
    }

    #[test]
    fn losses_and_probabilities_are_those_of_f64() {
        for (n, spread) in [
            (5, 2.0),
            (257, 8.0),
            (8192, 20.0),
            (50_304, 8.0),
            (151_936, 40.0),
        ] {
            for offset in [0.0, -64.0, 512.0] {
                let row: Vec<f32> = logits(n, spread, n as u64)
                    .iter()
                    .map(|x| x + offset)
                    .collect();
                let lse = exact_lse(&row);
                let found = LogitRow::of(&row);
                assert!(found.is_ordinary());
                for &x in row.iter().step_by(1 + n / 500) {
                    let loss = lse - f64::from(x);
                    let error = (f64::from(found.surprise(x)) - loss).abs();
                    assert!(
                        error < 3e-6 + 3e-7 * loss,
                        "{n} {offset}: {error:e} of {loss}"
                    );
                    let p = (-loss).exp();
                    let error = (f64::from(found.probability(x)) - p).abs();
                    assert!(
                        error < 1.2e-5 * p + 1e-36,
                        "{n} {offset}: {error:e} of {p:e}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_certain_target_has_no_negative_loss() {
        for top in [20.0, 37.25, 88.0, 300.0] {
            let mut row = vec![-40.0; 1000];
            row[123] = top;
            let found = LogitRow::of(&row);
            // The weight of the target alone is off by up to 2^-18.
            let loss = found.surprise(top);
            assert!((0.0..4e-6).contains(&loss), "{top}: {loss:e}");
            assert!((found.probability(top) - 1.0).abs() < 1e-5);
        }
    }

    #[test]
    fn a_later_tile_that_rises_leaves_the_bits_of_its_power_of_two() {
        let mut row = logits(3 * LOGIT_TILE, 8.0, 7);
        row[2 * LOGIT_TILE + 5] = 60.0;
        let lse = exact_lse(&row);
        let found = LogitRow::of(&row);
        assert!((f64::from(found.surprise(60.0)) - (lse - 60.0)).abs() < 3e-6);
        let mut references = References::new();
        let of_tiles: Vec<f32> = row
            .chunks(LOGIT_TILE)
            .map(|tile| references.take(tile, &mut []))
            .collect();
        assert!(of_tiles[1] < of_tiles[2]);
        assert_eq!(of_tiles[2], found.reference);
        let factor = found.tile_factor(of_tiles[0]);
        assert_eq!(factor.to_bits() & 0x007f_ffff, 0, "{factor:e}");
        let x = row[17];
        let there = score_weight(x, LOGIT_FACTOR, of_tiles[0]) * factor;
        let here = score_weight(x, LOGIT_FACTOR, found.reference);
        assert!((there - here).abs() <= 2e-6 * here);
    }

    #[test]
    fn what_is_not_finite_leaves_no_softmax_and_minus_infinity_no_weight() {
        for bad in [f32::NAN, f32::INFINITY] {
            for at in [0, LOGIT_TILE - 1, LOGIT_TILE, 2 * LOGIT_TILE] {
                let mut row = logits(2 * LOGIT_TILE + 1, 8.0, 3);
                row[at] = bad;
                let found = LogitRow::of(&row);
                assert!(!found.is_ordinary(), "{bad} at {at}");
                assert!(found.surprise(0.0).is_nan());
                assert!(found.factor(1.0, 1.0).is_nan());
            }
        }
        assert!(!LogitRow::of(&[f32::NEG_INFINITY; 300]).is_ordinary());
        // A tile of minus infinities, first or later, has no weight and changes no sum.
        let row = logits(LOGIT_TILE, 8.0, 5);
        let masked = [f32::NEG_INFINITY; LOGIT_TILE];
        let whole = LogitRow::of(&row);
        assert_eq!(LogitRow::of(&[&row[..], &masked].concat()), whole);
        assert_eq!(LogitRow::of(&[&masked, &row[..]].concat()), whole);
        assert_eq!(whole.probability(f32::NEG_INFINITY), 0.0);
        assert_eq!(whole.surprise(f32::NEG_INFINITY), f32::INFINITY);
    }

    #[test]
    fn logits_of_any_size_have_a_row_or_none() {
        for size in [1e4_f32, 1e7, 1e9, 3e38] {
            for sign in [1.0, -1.0] {
                let found = LogitRow::of(&[sign * size, 0.5 * sign * size]);
                let loss = found.surprise(size * sign);
                assert!(loss >= 0.0 || !found.is_ordinary(), "{size}: {loss}");
                assert!(found.is_ordinary() || size > 1e9, "{size}");
            }
        }
    }
}
