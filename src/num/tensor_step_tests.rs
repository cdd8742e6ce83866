//! The step against an independent formulation over exact rationals, and its special cases by hand.

use super::*;
use crate::num::tensor_model::{
    Floor, HugeProduct, NAN, Overflow, Rounding, Subnormals, ZeroProduct, ZeroSum,
};

/// The numbers of a linear congruential sequence.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// A number of the format with an exponent in the range, sometimes a zero.
    fn value(&mut self, kind: Kind, low: i32, high: i32) -> f32 {
        let exponent = low + self.below((high - low + 1) as u64) as i32;
        let fraction = 1.0 + self.below(1 << 23) as f64 / f64::from(1 << 23);
        let sign = if self.below(2) == 0 { 1.0 } else { -1.0 };
        match self.below(16) {
            0 => (0.0 * sign) as f32,
            _ => kind.round((sign * fraction * 2.0_f64.powi(exponent)) as f32),
        }
    }
}

/// The rule in binary64, for exponents at which every quantity is exact there.
fn by_doubles(kind: Kind, acc: f32, a: &[f32], b: &[f32]) -> f32 {
    let exponent = |x: f32, least: i32| {
        let e = (x.to_bits() >> 23 & 255) as i32 - 127;
        e.max(least)
    };
    let least = kind.least_exponent();
    let mut largest = if acc == 0.0 {
        -133
    } else {
        exponent(acc, -126)
    };
    for (&x, &y) in a.iter().zip(b).filter(|&(&x, &y)| x != 0.0 && y != 0.0) {
        largest = largest.max(exponent(x, least) + exponent(y, least));
    }
    let unit = 2.0_f64.powi(largest - 25);
    let cut = |x: f64| (x / unit).trunc();
    let products = a
        .iter()
        .zip(b)
        .map(|(&x, &y)| cut(f64::from(x) * f64::from(y)));
    let sum = (cut(f64::from(acc)) + products.sum::<f64>()) * unit;
    let nearest = sum as f32;
    let result = match f64::from(nearest).abs() > sum.abs() {
        true => f32::from_bits(nearest.to_bits() - 1),
        false => nearest,
    };
    if result == 0.0 { 0.0 } else { result }
}

#[test]
fn the_step_in_integers_is_the_rule_in_exact_doubles() {
    let mut numbers = Numbers(1);
    for kind in Kind::ALL {
        for (low, high) in [(0, 0), (-4, 4), (-14, 15), (-24, 10), (-60, 60)] {
            for _ in 0..4000 {
                let (low, high) = match kind {
                    Kind::F16 => (low.max(-24), high.min(15)),
                    _ => (low, high),
                };
                let a: Vec<f32> = (0..kind.k())
                    .map(|_| numbers.value(kind, low, high))
                    .collect();
                let b: Vec<f32> = (0..kind.k())
                    .map(|_| numbers.value(kind, low, high))
                    .collect();
                let acc = numbers.value(Kind::Tf32, low, high) * (1.0 + f32::EPSILON);
                let found = step(kind, acc, &a, &b);
                let expected = by_doubles(kind, acc, &a, &b);
                assert_eq!(
                    found.to_bits(),
                    expected.to_bits(),
                    "{kind:?} {acc:e} {a:?} {b:?}"
                );
            }
        }
    }
}

/// One pair of factors and zeros.
fn one(acc: f32, a: f32, b: f32) -> f32 {
    step(Kind::Bf16, acc, &[a], &[b])
}

fn power(exponent: i32) -> f32 {
    (2.0_f64).powi(exponent) as f32
}

#[test]
fn terms_are_cut_at_25_bits_and_the_sum_toward_zero() {
    // 2^-25 is the last bit kept beside 1; sixteen of them make a bit of the result, smaller ones vanish.
    let a = [1.0; 16];
    assert_eq!(
        step(Kind::Bf16, 1.0, &a, &[power(-25); 16]),
        1.0 + power(-21)
    );
    assert_eq!(step(Kind::Bf16, 1.0, &a, &[power(-26); 16]), 1.0);
    assert_eq!(
        step(Kind::Bf16, -1.0, &a, &[power(-25); 16]),
        -1.0 + power(-21)
    );
    // Three quarters of a last place are cut, on either side of zero.
    let three = [power(-25), power(-25), power(-25)];
    assert_eq!(step(Kind::Bf16, 1.0, &[1.0; 3], &three), 1.0);
    assert_eq!(step(Kind::Bf16, -1.0, &[-1.0; 3], &three), -1.0);
    // A product that is not normalised: 1.5 · 1.5 is aligned at exponent 0, so 2^-25 stays.
    assert_eq!(
        step(Kind::Bf16, -2.25, &[1.5, 1.0], &[1.5, power(-25)]),
        0.0
    );
    assert_eq!(
        step(Kind::Bf16, -1.25, &[1.5, 1.0], &[1.5, power(-25)]),
        1.0
    );
    assert_eq!(
        step(
            Kind::Bf16,
            -1.0,
            &[1.5, 1.25, 1.0],
            &[1.5, -1.0, power(-25)]
        ),
        power(-25)
    );
}

#[test]
fn zeros_subnormals_and_the_ends() {
    assert_eq!(one(-0.0, -0.0, 1.0).to_bits(), 0);
    assert_eq!(one(-0.0, 0.0, 0.0).to_bits(), 0);
    assert_eq!(one(1.5, -1.5, 1.0).to_bits(), 0);
    // A zero beside a large factor moves no exponent.
    assert_eq!(step(Kind::F16, power(-20), &[0.0], &[32768.0]), power(-20));
    let least = f32::from_bits(1);
    assert_eq!(one(least, 0.0, 0.0), least);
    assert_eq!(one(least, power(-126), power(-20)), f32::from_bits(9));
    assert_eq!(
        one(0.0, power(-75), power(-75)).to_bits(),
        0,
        "2^-150 is cut"
    );
    assert_eq!(
        step(Kind::F16, 0.0, &[power(-24)], &[power(-24)]),
        power(-48)
    );
    // Subnormal f16 numbers have the exponent -14: beside them 2^-28 - 25 = 2^-53 is the last bit.
    assert_eq!(
        step(Kind::F16, power(-54), &[power(-24)], &[power(-14)]),
        power(-38)
    );
    let most = f32::MAX;
    assert_eq!(
        one(most, power(100), power(3)),
        most,
        "below the last place"
    );
    assert_eq!(one(most, power(100), power(4)), f32::INFINITY);
    assert_eq!(
        one(-most, power(100), power(27)),
        -(power(127) - power(104))
    );
    assert_eq!(one(-most, -power(100), power(27)), f32::NEG_INFINITY);
    let cancel = step(
        Kind::Bf16,
        1.0,
        &[power(127), -power(127)],
        &[power(127); 2],
    );
    assert_eq!(
        cancel.to_bits(),
        0,
        "1 lies below what is kept beside 2^254"
    );
}

#[test]
fn infinities_and_nans() {
    let (inf, nan) = (f32::INFINITY, f32::from_bits(0xffff_ffff));
    assert_eq!(one(inf, 1.0, -1.0), inf);
    assert_eq!(one(0.0, -inf, 2.0), -inf);
    assert_eq!(one(-inf, power(127), power(127)), -inf);
    for (acc, a, b) in [
        (nan, 1.0, 1.0),
        (0.0, nan, 0.0),
        (0.0, inf, 0.0),
        (inf, -inf, 1.0),
    ] {
        assert_eq!(one(acc, a, b).to_bits(), NAN.to_bits());
    }
    let both = step(Kind::Tf32, 0.0, &[inf, inf], &[1.0, -1.0]);
    assert_eq!(both.to_bits(), NAN.to_bits());
}

#[test]
fn a_chain_is_its_steps_and_zeros_pad_its_tail() {
    let mut numbers = Numbers(7);
    for kind in Kind::ALL {
        let k = kind.k();
        let n = 3 * k + 5;
        let mut a: Vec<f32> = (0..n).map(|_| numbers.value(kind, -6, 6)).collect();
        let mut b: Vec<f32> = (0..n).map(|_| numbers.value(kind, -6, 6)).collect();
        let found = chain(kind, 0.5, &a, &b);
        a.resize(4 * k, 0.0);
        b.resize(4 * k, -0.0);
        let mut expected = 0.5;
        for i in (0..4 * k).step_by(k) {
            expected = step(kind, expected, &a[i..i + k], &b[i..i + k]);
        }
        assert_eq!(found.to_bits(), expected.to_bits());
        assert_eq!(chain(kind, -0.0, &[], &[]).to_bits(), (-0.0_f32).to_bits());
    }
}

/// A model, and a step on which it gives other bits than the contract's.
type Other<'a> = (StepModel, Kind, f32, &'a [f32], &'a [f32]);

fn others_of_width<'a>(unit: &'a [f32], tails: [&'a [f32]; 3]) -> [Other<'a>; 4] {
    let hopper = StepModel::HOPPER;
    let bits = |fraction_bits| StepModel {
        fraction_bits,
        ..hopper
    };
    let halves = StepModel { fused: 8, ..hopper };
    let nearest = StepModel {
        rounding: Rounding::NearestEven,
        ..hopper
    };
    [
        (bits(24), Kind::Bf16, 1.0, unit, tails[0]),
        (bits(26), Kind::Bf16, 1.0, unit, tails[1]),
        (halves, Kind::Bf16, 1.0, unit, tails[2]),
        (nearest, Kind::Bf16, 1.0, &unit[..3], &tails[0][..3]),
    ]
}

#[test]
fn each_other_model_differs_where_it_should() {
    let mut split = [0.0; 16];
    for i in [0, 1, 2, 8] {
        split[i] = power(-25);
    }
    let (unit, last, below) = ([1.0; 16], [power(-25); 16], [power(-26); 16]);
    let widths = others_of_width(&unit, [&last, &below, &split]);
    let (hopper, tiny) = (StepModel::HOPPER, f32::from_bits(3));
    let (mut aligns, mut floor, mut factors) = (hopper, hopper, hopper);
    let (mut normalised, mut accumulator, mut huge) = (hopper, hopper, hopper);
    let (mut results, mut overflow, mut zero) = (hopper, hopper, hopper);
    aligns.zero_product = ZeroProduct::Aligns;
    floor.floor = Floor::None;
    factors.factors = Subnormals::Flushed;
    normalised.factors = Subnormals::Normalised;
    accumulator.accumulator = Subnormals::Flushed;
    results.results = Subnormals::Flushed;
    overflow.overflow = Overflow::Largest;
    zero.zero_sum = ZeroSum::NegativeOfNegatives;
    huge.huge_product = HugeProduct::Infinite;
    let f16 = Kind::F16;
    let (far, pair) = ([power(127); 2], [power(127), -power(127)]);
    // One product just below 2^-149, and 15 that lift it there together but are cut singly at 2^-158.
    let mut below_zero = [[1.125 * power(-80); 16], [power(-79); 16]];
    (below_zero[0][0], below_zero[1][0]) = (63.0 * power(-80), power(-75));
    let others: [Other; 9] = [
        (huge, Kind::Bf16, 0.0, &far, &pair),
        (aligns, f16, power(-25), &[0.0], &[power(15)]),
        (floor, Kind::Bf16, 0.0, &below_zero[0], &below_zero[1]),
        (factors, f16, 0.0, &[power(-24)], &[1.0]),
        (normalised, f16, power(-54), &[power(-24)], &[power(-14)]),
        (accumulator, f16, tiny, &[0.0], &[1.0]),
        (results, f16, tiny, &[0.0], &[1.0]),
        (overflow, Kind::Bf16, f32::MAX, &[power(100)], &[power(4)]),
        (zero, f16, -0.0, &[-0.0], &[1.0]),
    ];
    for (model, kind, acc, a, b) in widths.into_iter().chain(others) {
        let (other, own) = (model.step(kind, acc, a, b), step(kind, acc, a, b));
        assert_ne!(other.to_bits(), own.to_bits(), "{model:?}");
    }
}
