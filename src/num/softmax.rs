//! The online softmax of the tensor-core domains.
//!
//! Exponents are counted in units of 128 doublings: with `k` of [`score_factor`], the weight of
//! a score `s` beside a row's reference `r` is `weight(fma(-s, k, r)) = 2^(1 + s · scale · log2(e) - 128 r)`. References
//! lie `GRID` apart and only rise when a score would pass above, so that most tiles rescale nothing, and a change
//! of reference is a power of two.

use super::elementary::{log, weight};

/// Doublings of one unit.
const DOUBLINGS: f64 = 128.0;
/// References are multiples of this: four doublings.
const GRID: f32 = 1.0 / 32.0;
/// 1.5 · 2^23 · [`GRID`]: adding it rounds to a multiple of the grid.
const ROUND: f32 = 393_216.0;
/// `log2(e) / 128`.
const LOG2_E: f32 = (std::f64::consts::LOG2_E / DOUBLINGS) as f32;

/// The factor from a dot product of `head_dim` terms to the exponent's unit: `log2(e) / (128 · sqrt(head_dim))`,
/// computed in f64 and rounded once.
pub fn score_factor(head_dim: usize) -> f32 {
    (std::f64::consts::LOG2_E / (DOUBLINGS * (head_dim as f64).sqrt())) as f32
}

/// The weight of a score `s` beside `reference`, or a probability beside what [`row_statistic`] gives.
#[inline(always)]
pub fn score_weight(s: f32, factor: f32, reference: f32) -> f32 {
    weight((-s).mul_add(factor, reference))
}

/// A row's sums move to a new reference by `fma(sum, factor, addend)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rescale {
    /// The power of two between the two references.
    pub factor: f32,
    /// `+0.0`; a NaN where the scores were not finite, so that the row becomes one.
    pub addend: f32,
}

/// A row's reference before any score.
pub const NO_REFERENCE: f32 = f32::NAN;

/// Raises `reference` so that scores up to `top` have weights up to 2; `None` where it is high enough.
///
/// `top` is the greatest score, a NaN if one is.
#[inline(always)]
pub fn raise(reference: &mut f32, top: f32, factor: f32) -> Option<Rescale> {
    let y = top * factor;
    if y <= *reference {
        return None;
    }
    let raised = ((y + 0.5 * GRID) + ROUND) - ROUND;
    let rescale = Rescale {
        factor: 0.5 * weight(raised - *reference),
        addend: if y.is_finite() { 0.0 } else { f32::NAN },
    };
    *reference = raised;
    Some(rescale)
}

/// What the backward pass needs of a row: the reference beside which weights are probabilities. It is
/// `(1 + log2(e) · lse) / 128` with `lse` the log of the sum of exponentials of the scaled scores.
#[inline(always)]
pub fn row_statistic(reference: f32, sum: f32) -> f32 {
    if sum.is_nan() {
        return f32::NAN;
    }
    log(sum).mul_add(LOG2_E, reference)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums of weights over tiles of scores, moved along with the reference.
    fn online(tiles: &[&[f32]], factor: f32) -> (f32, f32) {
        let (mut reference, mut sum) = (NO_REFERENCE, 0.0_f32);
        for tile in tiles {
            let top = tile.iter().copied().reduce(f32::max).unwrap_or(f32::NAN);
            if let Some(rescale) = raise(&mut reference, top, factor) {
                sum = sum.mul_add(rescale.factor, rescale.addend);
            }
            for &s in *tile {
                sum += score_weight(s, factor, reference);
            }
        }
        (reference, sum)
    }

    #[test]
    fn probabilities_add_up_to_one_and_are_those_of_the_formula() {
        let factor = score_factor(64);
        let tiles: [&[f32]; 4] = [
            &[-300.0, -8.0, 3.5],
            &[2.0, 90.0],
            &[88.0, -1e6],
            &[400.0, 396.0],
        ];
        let (reference, sum) = online(&tiles, factor);
        let statistic = row_statistic(reference, sum);
        let exact: f64 = tiles
            .concat()
            .iter()
            .map(|&s| (f64::from(s) / 8.0 - 50.0).exp())
            .sum();
        let mut total = 0.0_f64;
        for &s in tiles.concat().iter() {
            let p = f64::from(score_weight(s, factor, statistic));
            let expected = (f64::from(s) / 8.0 - 50.0).exp() / exact;
            assert!((p - expected).abs() < 1e-5 * expected + 1e-37, "{s}: {p}");
            total += p;
        }
        assert!((total - 1.0).abs() < 1e-5, "{total}");
        let lse = (f64::from(statistic) * 128.0 - 1.0) / std::f64::consts::LOG2_E;
        assert!((lse - (50.0 + exact.ln())).abs() < 2e-5, "{lse}");
    }

    #[test]
    fn a_reference_rises_only_when_a_score_passes_it_and_by_a_power_of_two() {
        let factor = score_factor(64);
        let mut reference = NO_REFERENCE;
        let first = raise(&mut reference, 1.0, factor).expect("the first score");
        assert_eq!((reference, first.addend), (1.0 / 32.0, 0.0));
        assert_eq!(raise(&mut reference, 20.0, factor), None);
        let second = raise(&mut reference, 60.0, factor).expect("a score above");
        assert_eq!(reference, 3.0 / 32.0);
        assert_eq!(second.factor, 1.0 / 256.0);
        let top = score_weight(60.0, factor, reference);
        assert!((0.125..=2.0).contains(&top), "{top}");
    }

    #[test]
    fn scores_that_are_not_finite_make_their_row_a_nan() {
        let factor = score_factor(16);
        for bad in [f32::INFINITY, f32::NAN] {
            let mut reference = NO_REFERENCE;
            let rescale = raise(&mut reference, bad, factor).expect("not below");
            assert!(1.0_f32.mul_add(rescale.factor, rescale.addend).is_nan());
            // What comes later cannot make it a number again.
            raise(&mut reference, 1.0, factor);
            assert!(row_statistic(reference, f32::NAN).is_nan());
        }
        // A single score of minus infinity has no weight; a row of them alone has no softmax.
        let (_, sum) = online(&[&[f32::NEG_INFINITY, 0.0]], factor);
        assert!((0.125..=2.0).contains(&sum));
        let (_, sum) = online(&[&[f32::NEG_INFINITY], &[1.0]], factor);
        assert!(sum.is_nan());
    }
}
