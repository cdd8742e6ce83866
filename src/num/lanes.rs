//! Row reductions over 256 lanes.
//!
//! Every lane starts at `+0.0`; lane l takes elements l, l + 256, … ascending; then the lanes fold by
//! halving, l with l + 128, then l + 64, down to 1. Rows of at most 128 elements need only the lanes
//! that they fill: the others hold `+0.0`, and as `+0.0 + +0.0` is `+0.0` and adding `+0.0` twice equals
//! adding it once, one `+ 0.0` on each lane stands for all folds with lanes that are absent. That one is
//! not left out, since it turns the `-0.0` of an underflowed product into `+0.0`.
//!
//! The functions are always inlined, so that a caller compiled for wider vectors gets them.

/// Lanes of a row reduction.
pub const LANES: usize = 256;

/// Folds `W` lanes, a power of two, by halving.
#[inline(always)]
fn fold<T: Copy, const W: usize>(mut lanes: [T; W], merge: impl Fn(T, T) -> T) -> T {
    let mut half = W / 2;
    while half > 0 {
        let (low, high) = lanes.split_at_mut(half);
        for (a, b) in low.iter_mut().zip(high.iter()) {
            *a = merge(*a, *b);
        }
        half /= 2;
    }
    lanes[0]
}

/// Folds all lanes of a sum by halving.
#[inline(always)]
pub fn fold_lanes(lanes: [f32; LANES]) -> f32 {
    fold(lanes, |a, b| a + b)
}

/// Runs `W` lanes over rows of `n` elements.
#[inline(always)]
fn accumulate<const W: usize, const K: usize>(
    rows: [&[f32]; K],
    n: usize,
    step: &impl Fn([f32; K], f32) -> f32,
) -> [f32; W] {
    let mut lanes = [0.0; W];
    let whole = n - n % W;
    for start in (0..whole).step_by(W) {
        let Some(parts) = window::<W, K>(rows, start) else {
            return lanes;
        };
        for l in 0..W {
            lanes[l] = step(std::array::from_fn(|k| parts[k][l]), lanes[l]);
        }
    }
    let rest = rows.map(|r| &r[whole..n]);
    for (l, lane) in lanes.iter_mut().enumerate().take(n - whole) {
        *lane = step(std::array::from_fn(|k| rest[k][l]), *lane);
    }
    lanes
}

/// The `W` elements from `start` of each row.
#[inline(always)]
fn window<const W: usize, const K: usize>(
    rows: [&[f32]; K],
    start: usize,
) -> Option<[&[f32; W]; K]> {
    let mut parts = [&[0.0; W]; K];
    for (part, row) in parts.iter_mut().zip(rows) {
        *part = row.get(start..)?.first_chunk()?;
    }
    Some(parts)
}

/// The reduction of a row no longer than `W`, with `W` at most 128.
#[inline(always)]
fn narrow<const W: usize, const K: usize>(
    rows: [&[f32]; K],
    n: usize,
    step: &impl Fn([f32; K], f32) -> f32,
) -> f32 {
    let lanes = accumulate::<W, K>(rows, n, step);
    fold(lanes.map(|a| a + 0.0), |a, b| a + b)
}

/// Reduces `K` rows of one length together: `step(elements, acc)` gives a lane's next value.
///
/// Takes as many elements as the shortest row has; `+0.0` for none.
#[inline(always)]
pub fn lane_reduce_rows<const K: usize>(
    rows: [&[f32]; K],
    step: impl Fn([f32; K], f32) -> f32,
) -> f32 {
    let n = rows.iter().map(|r| r.len()).min().unwrap_or(0);
    match n {
        0..=16 => narrow::<16, K>(rows, n, &step),
        17..=32 => narrow::<32, K>(rows, n, &step),
        33..=64 => narrow::<64, K>(rows, n, &step),
        65..=128 => narrow::<128, K>(rows, n, &step),
        _ => fold_lanes(accumulate::<LANES, K>(rows, n, &step)),
    }
}

/// The sum of a row.
#[inline(always)]
pub fn lane_sum(row: &[f32]) -> f32 {
    lane_reduce_rows([row], |[x], acc| acc + x)
}

/// The sum of the squares of a row, each lane a chain of fused multiply-adds.
#[inline(always)]
pub fn lane_sum_of_squares(row: &[f32]) -> f32 {
    lane_reduce_rows([row], |[x], acc| x.mul_add(x, acc))
}

/// The dot product of two rows of one length, each lane a chain of fused multiply-adds.
#[inline(always)]
pub fn lane_dot(a: &[f32], b: &[f32]) -> f32 {
    lane_reduce_rows([a, b], |[x, y], acc| x.mul_add(y, acc))
}

/// The greatest element, NaNs left out; `-inf` for none. A zero is `+0.0`, so no order can show.
#[inline(always)]
pub fn lane_max(row: &[f32]) -> f32 {
    /// Any width gives the same maximum; this one fills two vectors of 512 bits.
    const WIDTH: usize = 32;
    let greater = |a: f32, x: f32| if x > a { x } else { a };
    let mut lanes = [f32::NEG_INFINITY; WIDTH];
    let (chunks, rest) = row.as_chunks::<WIDTH>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = greater(*lane, x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = greater(*lane, x);
    }
    fold(lanes, greater) + 0.0
}

/// The sum of the squares of a block in binary64, by the same lanes and fold. Each square is exact.
#[inline(always)]
pub fn square_sum_f64(block: &[f32]) -> f64 {
    let mut lanes = [0.0_f64; LANES];
    let (chunks, rest) = block.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = f64::from(x).mul_add(f64::from(x), *lane);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = f64::from(x).mul_add(f64::from(x), *lane);
    }
    fold(lanes, |a, b| a + b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, with all 256 lanes.
    fn naive(n: usize, step: impl Fn(usize, f32) -> f32) -> f32 {
        let mut lanes = vec![0.0_f32; 256];
        for i in 0..n {
            lanes[i % 256] = step(i, lanes[i % 256]);
        }
        for half in [128, 64, 32, 16, 8, 4, 2, 1] {
            for l in 0..half {
                lanes[l] += lanes[l + half];
            }
        }
        lanes[0]
    }

    /// Numbers of all sizes, with zeros of both signs and subnormal numbers often.
    fn element() -> impl Strategy<Value = f32> {
        prop_oneof![
            4 => -4.0_f32..4.0,
            1 => Just(-0.0_f32),
            1 => Just(0.0_f32),
            1 => (0_u32..0x0080_0000, any::<bool>())
                .prop_map(|(b, s)| f32::from_bits(b | u32::from(s) << 31)),
            1 => (0_u32..0x7000_0000, any::<bool>())
                .prop_map(|(b, s)| f32::from_bits(b | u32::from(s) << 31)),
        ]
    }

    /// Two rows of one length from 0 to 1,100, short ones as often as long ones.
    fn rows() -> impl Strategy<Value = Vec<(f32, f32)>> {
        prop_oneof![
            prop::collection::vec((element(), element()), 0..140),
            prop::collection::vec((element(), element()), 0..1100),
        ]
    }

    proptest! {
        #[test]
        fn every_width_gives_the_bits_of_the_definition(pairs in rows()) {
            let (a, b): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
            let n = a.len();
            let sum = naive(n, |i, acc| acc + a[i]);
            let squares = naive(n, |i, acc| a[i].mul_add(a[i], acc));
            let dot = naive(n, |i, acc| a[i].mul_add(b[i], acc));
            prop_assert_eq!(lane_sum(&a).to_bits(), sum.to_bits());
            prop_assert_eq!(lane_sum_of_squares(&a).to_bits(), squares.to_bits());
            // An infinity of each sign in two lanes gives a NaN, whose bits the contract leaves open.
            let got = lane_dot(&a, &b);
            prop_assert!(got.to_bits() == dot.to_bits() || got.is_nan() && dot.is_nan());
        }
    }

    #[test]
    fn an_underflowed_negative_product_is_positive_zero_when_a_lane_is_absent() {
        let (a, b) = (vec![-1e-30_f32; 256], vec![1e-30_f32; 256]);
        for n in [1, 15, 16, 17, 32, 100, 128] {
            assert_eq!(lane_dot(&a[..n], &b[..n]).to_bits(), 0, "{n} elements");
        }
        // With every lane present each fold adds two negative zeros.
        assert_eq!(lane_dot(&a, &b).to_bits(), (-0.0_f32).to_bits());
        assert_eq!(lane_dot(&a[..255], &b).to_bits(), 0);
        // What the narrow form would give without its one addition.
        let lanes = accumulate::<16, 2>([&a, &b], 16, &|[x, y], acc| x.mul_add(y, acc));
        assert_eq!(fold(lanes, |a, b| a + b).to_bits(), (-0.0_f32).to_bits());
    }

    #[test]
    fn the_order_is_that_of_lanes_not_of_a_chain() {
        let row: Vec<f32> = (0..600).map(|i| 1.0 / (i as f32 + 1.0)).collect();
        let chain: f32 = row.iter().fold(0.0, |a, x| a + x);
        assert_ne!(lane_sum(&row).to_bits(), chain.to_bits());
        assert_eq!(lane_sum(&[]).to_bits(), 0);
    }

    #[test]
    fn the_maximum_ignores_order_nan_and_the_sign_of_zero() {
        assert_eq!(lane_max(&[]), f32::NEG_INFINITY);
        assert_eq!(lane_max(&[f32::NAN, -3.0, f32::NAN]), -3.0);
        assert_eq!(lane_max(&[-0.0, -1.0]).to_bits(), 0);
        for n in [1, 31, 32, 33, 257] {
            let mut row: Vec<f32> = (0..n).map(|i| -(i as f32) - 1.0).collect();
            row.reverse();
            assert_eq!(lane_max(&row), -1.0);
            row[n / 2] = f32::INFINITY;
            assert_eq!(lane_max(&row), f32::INFINITY);
        }
    }

    #[test]
    fn squares_in_binary64_follow_the_lanes() {
        for n in [0, 1, 255, 256, 257, 5000] {
            let block: Vec<f32> = (0..n)
                .map(|i| ((i * 37 % 101) as f32 - 50.0) / 7.0)
                .collect();
            let mut lanes = [0.0_f64; 256];
            for (i, &x) in block.iter().enumerate() {
                lanes[i % 256] = f64::from(x).mul_add(f64::from(x), lanes[i % 256]);
            }
            for half in [128, 64, 32, 16, 8, 4, 2, 1] {
                for l in 0..half {
                    lanes[l] += lanes[l + half];
                }
            }
            assert_eq!(square_sum_f64(&block).to_bits(), lanes[0].to_bits(), "{n}");
        }
    }
}
