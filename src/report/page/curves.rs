//! Curves: long ones made short enough to draw, noisy ones smoothed.

/// The most points that a curve is drawn with.
const MOST_POINTS: usize = 600;
/// Curves of fewer points are not smoothed.
const FEWEST_TO_SMOOTH: usize = 40;

/// A stretch of a curve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bucket {
    /// The mean place along the axis.
    pub x: f64,
    pub mean: f64,
    pub low: f64,
    pub high: f64,
}

/// The points of a curve in at most 600 stretches of equal numbers of points, each with the mean, the
/// least and the greatest of its values. Values that are not finite are left out.
pub fn buckets(points: &[(f64, f64)]) -> Vec<Bucket> {
    let finite: Vec<(f64, f64)> = points.iter().copied().filter(|p| p.1.is_finite()).collect();
    let size = finite.len().div_ceil(MOST_POINTS).max(1);
    let bucket = |part: &[(f64, f64)]| {
        let count = part.len() as f64;
        let values = || part.iter().map(|p| p.1);
        Bucket {
            x: part.iter().map(|p| p.0).sum::<f64>() / count,
            mean: values().sum::<f64>() / count,
            low: values().fold(f64::INFINITY, f64::min),
            high: values().fold(f64::NEG_INFINITY, f64::max),
        }
    };
    finite.chunks(size).map(bucket).collect()
}

/// The moving mean of a curve, whose weights fall by half over a hundredth of its points on either side,
/// so that it does not lag behind; `None` for a curve of too few points. Values near an end count no
/// more than their number.
pub fn smoothed(points: &[(f64, f64)]) -> Option<Vec<(f64, f64)>> {
    if points.len() < FEWEST_TO_SMOOTH {
        return None;
    }
    let decay = 0.5f64.powf(100.0 / points.len() as f64).max(0.5);
    let finite: Vec<(f64, f64)> = points.iter().copied().filter(|p| p.1.is_finite()).collect();
    let before = means(finite.iter().map(|p| p.1), decay);
    let mut after = means(finite.iter().rev().map(|p| p.1), decay);
    after.reverse();
    let both = finite.iter().zip(before.iter().zip(&after));
    Some(both.map(|((x, _), (a, b))| (*x, (a + b) / 2.0)).collect())
}

/// For each value the mean of it and those before it, each counting `decay` times what the next one does.
fn means(values: impl Iterator<Item = f64>, decay: f64) -> Vec<f64> {
    let (mut sum, mut weight) = (0.0, 0.0);
    let mean = |value: f64| {
        sum = decay * sum + value;
        weight = decay * weight + 1.0;
        sum / weight
    };
    values.map(mean).collect()
}

/// The middle of some values; `None` when there is none.
pub fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.filter(|v| v.is_finite()).collect();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_curve_keeps_its_extremes_and_its_mean() {
        let points: Vec<(f64, f64)> = (0..100_000)
            .map(|i| (f64::from(i), if i == 777 { 1e6 } else { 2.0 }))
            .collect();
        let found = buckets(&points);
        assert!(found.len() <= MOST_POINTS);
        assert!(found.iter().any(|b| b.high == 1e6 && b.low == 2.0));
        assert!(found.windows(2).all(|pair| pair[0].x < pair[1].x));
        let few = buckets(&[(0.0, 1.0), (1.0, f64::NAN), (2.0, 3.0)]);
        assert_eq!(few.len(), 2);
        assert_eq!((few[1].low, few[1].mean, few[1].high), (3.0, 3.0, 3.0));
    }

    #[test]
    fn a_smoothed_curve_does_not_lag_and_is_calmer_than_its_values() {
        let points: Vec<(f64, f64)> = (0..1000).map(|i| (f64::from(i), 5.0)).collect();
        let curve = smoothed(&points).unwrap();
        assert!(curve.iter().all(|(_, y)| (y - 5.0).abs() < 1e-9));
        assert_eq!(smoothed(&points[..FEWEST_TO_SMOOTH - 1]), None);
        let noise = |i: i32| if i % 2 == 0 { 30.0 } else { -30.0 };
        let rising: Vec<(f64, f64)> = (0..1000)
            .map(|i| (f64::from(i), f64::from(i) + noise(i)))
            .collect();
        let curve = smoothed(&rising).unwrap();
        let middle = &curve[200..800];
        assert!(middle.iter().all(|(x, y)| (x - y).abs() < 4.0));
    }

    #[test]
    fn the_median_is_of_finite_values() {
        let found = median([3.0, f64::NAN, 1.0, 2.0].into_iter());
        assert_eq!(found, Some(2.0));
        assert_eq!(median([].into_iter()), None);
    }
}
