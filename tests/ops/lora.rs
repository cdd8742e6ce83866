//! Adapters and NF4 against their formulas, element by element, and adapters against differences.

use bitstep::num::nf4::{CODE, blocks, packed_bytes};
use bitstep::num::tree::TokenSum;
use bitstep::op::Store;
use bitstep::op::lora::{
    Adapters, LoraDown, LoraDownGradInput, LoraUp, LoraUpGradInput, LoraUpGradWeight, Part,
};
use bitstep::op::nf4::Dequantise;
use bitstep::shape::Math;

use super::differences::{assert_gradient, dot, wide};
use super::reference::token_sum;
use super::runner::{Case, Device, Numbers, Values, assert_bits_on, devices, run};

/// The devices that have these ops: a GPU refuses them by name.
fn cpus() -> impl Iterator<Item = &'static dyn Device> {
    let all = devices().iter().map(|d| d.as_ref());
    all.filter(|d: &&dyn Device| d.name().starts_with("CPU"))
}

const MATH: Math = Math::F32;

fn chain(pairs: impl Iterator<Item = (f32, f32)>) -> f32 {
    pairs.fold(0.0, |acc, (a, b)| a.mul_add(b, acc))
}

fn adapters(rank: usize, n_out: usize, parts: &[(usize, usize)]) -> Adapters {
    let part = |&(first, columns): &(usize, usize)| Part { first, columns };
    Adapters {
        rank,
        n_out,
        parts: parts.iter().map(part).collect(),
        scale: 1.7,
    }
}

/// One part, the outer parts of three, all of two, rank one.
fn shapes() -> [(usize, Adapters); 4] {
    [
        (5, adapters(3, 11, &[(0, 11)])),
        (33, adapters(8, 40, &[(0, 17), (30, 10)])),
        (7, adapters(4, 12, &[(0, 6), (6, 6)])),
        (1, adapters(1, 3, &[(1, 1)])),
    ]
}

/// For each row of the stacked `b`: its part, and its column of `y`.
fn rows_of(a: &Adapters) -> Vec<(usize, usize)> {
    let parts = a.parts.iter().enumerate();
    let rows = parts.flat_map(|(p, part)| (0..part.columns).map(move |o| (p, part.first + o)));
    rows.collect()
}

#[test]
fn the_sum_goes_to_the_columns_of_its_part_alone() {
    for (seed, (rows, adapters)) in (1..).zip(shapes()) {
        let a = adapters.clone();
        let case = Case::random(
            LoraUp {
                rows,
                adapters,
                math: MATH,
            },
            seed,
        );
        let (s, b) = (case.reads[0].f32s(), case.reads[1].f32s());
        let mut y = case.writes[0].f32s().to_vec();
        for t in 0..rows {
            for (row, (p, column)) in rows_of(&a).into_iter().enumerate() {
                let ranks = 0..a.rank;
                let pair = |k| (s[t * a.ranks() + p * a.rank + k], b[row * a.rank + k]);
                let sum = chain(ranks.map(pair));
                let place = &mut y[t * a.n_out + column];
                *place = a.scale.mul_add(sum, *place);
            }
        }
        assert_bits_on(cpus(), &case, &[Values::F32(y)]);
    }
}

#[test]
fn the_gradients_of_the_sum_have_their_bits() {
    for (seed, (rows, adapters)) in (1..).zip(shapes()) {
        let a = adapters.clone();
        let op = LoraUpGradInput {
            rows,
            adapters: a.clone(),
            math: MATH,
        };
        let case = Case::random(op, seed);
        let (dy, b) = (case.reads[0].f32s(), case.reads[1].f32s());
        let stacked = rows_of(&a);
        let element = |at: usize| {
            let (t, part, k) = (at / a.ranks(), at % a.ranks() / a.rank, at % a.rank);
            let rows = stacked.iter().enumerate().filter(|(_, (p, _))| *p == part);
            let pair = |(row, (_, c)): (usize, &(usize, usize))| {
                (dy[t * a.n_out + c], b[row * a.rank + k])
            };
            chain(rows.map(pair)) * a.scale
        };
        let ds = (0..rows * a.ranks()).map(element).collect();
        assert_bits_on(cpus(), &case, &[Values::F32(ds)]);
        for (grain, piece) in [(rows, rows), (4, 3), (rows, 2)] {
            let tokens = rows;
            let sum = TokenSum {
                tokens,
                grain,
                piece,
            };
            let op = LoraUpGradWeight {
                adapters: a.clone(),
                sum,
                math: MATH,
            };
            let case = Case::random(op, seed);
            let (dy, s) = (case.reads[0].f32s(), case.reads[1].f32s());
            let element = |at: usize| {
                let ((p, c), k) = (stacked[at / a.rank], at % a.rank);
                let pair = |t| (dy[t * a.n_out + c], s[t * a.ranks() + p * a.rank + k]);
                token_sum(&sum, |tokens| chain(tokens.map(pair))) * a.scale
            };
            let db = (0..a.up_rows() * a.rank).map(element).collect();
            assert_bits_on(cpus(), &case, &[Values::F32(db)]);
        }
    }
}

#[test]
fn the_lower_product_and_its_input_gradient_have_their_bits() {
    for (seed, [rows, n_in, ranks]) in (1..).zip([[1, 1, 1], [7, 33, 4], [40, 64, 24]]) {
        let op = LoraDown {
            rows,
            n_in,
            ranks,
            math: MATH,
        };
        let case = Case::random(op, seed);
        let (x, a) = (case.reads[0].f32s(), case.reads[1].f32s());
        let element = |at: usize| {
            let (t, k) = (at / ranks, at % ranks);
            chain((0..n_in).map(|i| (x[t * n_in + i], a[k * n_in + i])))
        };
        let s = (0..rows * ranks).map(element).collect();
        assert_bits_on(cpus(), &case, &[Values::F32(s)]);
        for store in [Store::Assign, Store::Add] {
            let op = LoraDownGradInput {
                rows,
                n_in,
                ranks,
                store,
                math: MATH,
            };
            let case = Case::random(op, seed);
            let (ds, a) = (case.reads[0].f32s(), case.reads[1].f32s());
            let before = case.writes[0].f32s();
            let element = |at: usize| {
                let (t, i) = (at / n_in, at % n_in);
                let sum = chain((0..ranks).map(|k| (ds[t * ranks + k], a[k * n_in + i])));
                match store {
                    Store::Assign => sum,
                    Store::Add => before[at] + sum,
                }
            };
            let dx = (0..rows * n_in).map(element).collect();
            assert_bits_on(cpus(), &case, &[Values::F32(dx)]);
        }
    }
}

#[test]
fn the_gradients_are_those_of_differences() {
    let (rows, a) = (9, adapters(3, 14, &[(0, 5), (8, 6)]));
    let mut numbers = Numbers::new(3);
    let dy = numbers.ordinary(rows * a.n_out);
    let s = numbers.ordinary(rows * a.ranks());
    let b = numbers.ordinary(a.up_rows() * a.rank);
    let coefficients = wide(&dy);
    let stacked = rows_of(&a);
    let loss = |s: &[f64], b: &[f64]| -> f64 {
        let mut total = 0.0;
        for t in 0..rows {
            for (row, (p, column)) in stacked.iter().enumerate() {
                let s = &s[t * a.ranks() + p * a.rank..][..a.rank];
                let sum = dot(s, &b[row * a.rank..][..a.rank]);
                total += coefficients[t * a.n_out + column] * f64::from(a.scale) * sum;
            }
        }
        total
    };
    let op = LoraUpGradInput {
        rows,
        adapters: a.clone(),
        math: MATH,
    };
    let case = Case::random(op, 0)
        .with("dy", dy.clone())
        .with("b", b.clone());
    let (s_point, b_point) = (wide(&s), wide(&b));
    assert_gradient(&s_point, &run(&case)[0], |s| loss(s, &b_point));
    let sum = TokenSum {
        tokens: rows,
        grain: 6,
        piece: 4,
    };
    let op = LoraUpGradWeight {
        adapters: a.clone(),
        sum,
        math: MATH,
    };
    let case = Case::random(op, 0).with("dy", dy).with("s", s);
    assert_gradient(&b_point, &run(&case)[0], |b| loss(&s_point, b));
}

#[test]
fn packed_weights_have_the_values_of_their_codes() {
    for elements in [1, 2, 63, 64, 65, 200, 20_000] {
        let mut numbers = Numbers::new(elements as u64);
        let codes = (0..packed_bytes(elements)).map(|_| numbers.below(256) as u8);
        let codes: Vec<u8> = codes.collect();
        let maxima = numbers.ordinary(blocks(elements));
        for math in [Math::F32, Math::Bf16, Math::F16] {
            let value = |i: usize| {
                let byte = codes[i / 2];
                let code = if i.is_multiple_of(2) {
                    byte >> 4
                } else {
                    byte & 15
                };
                CODE[usize::from(code)] * maxima.f32s()[i / 64]
            };
            let numbers: Vec<f32> = (0..elements).map(value).collect();
            let case = Case::random(Dequantise { elements, math }, 0)
                .with("packed", Values::U8(codes.clone()))
                .with("maxima", maxima.clone());
            assert_bits_on(cpus(), &case, &[Values::stored(math.storage(), &numbers)]);
        }
    }
}
