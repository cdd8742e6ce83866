//! Adapters and NF4 against their formulas, element by element, and adapters against differences.

use bitstep::num::nf4::{CODE, blocks, packed_bytes};
use bitstep::num::tensor_step::Kind;
use bitstep::num::tree::TokenSum;
use bitstep::op::Store;
use bitstep::op::embed::EmbedFrozen;
use bitstep::op::lora::{
    Adapters, LoraDown, LoraDownGradInput, LoraUp, LoraUpGradInput, LoraUpGradWeight, Part,
};
use bitstep::op::nf4::Dequantise;
use bitstep::shape::Math;

use super::differences::{assert_gradient, dot, wide};
use super::reference::token_sum;
use super::runner::{Case, Numbers, Values, assert_bits, run};
use super::tensor;

/// The chain of a product: fused multiply-adds, or tensor-core steps.
fn chain(math: Math, pairs: impl Iterator<Item = (f32, f32)>) -> f32 {
    match Kind::of(math) {
        None => pairs.fold(0.0, |acc, (a, b)| a.mul_add(b, acc)),
        Some(kind) => tensor::chain(kind, 0.0, pairs),
    }
}

/// The numbers of an operand, widened where it stores 16 bits.
fn numbers(values: &Values) -> Vec<f32> {
    values.widened().f32s().to_vec()
}

/// Compares with f32 numbers that are rounded to what the first written operand stores.
fn assert_stored(case: &Case, numbers: Vec<f32>) {
    let dtype = case.op.rule().signature().writes[0].dtype;
    assert_bits(case, &[Values::stored(dtype, &numbers)]);
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

/// One part, the outer parts of three, all of two, rank one; whole chunks of 16 bytes, in five parts, with gaps; more
/// ranks than a tile has columns, than the narrowest has, and than any has, over more columns than are under way at once;
/// whole strips of 64 columns with one, two and three steps of terms, the last one whole and not.
fn shapes() -> [(usize, Adapters); 13] {
    let five = [(8, 72), (80, 8), (160, 16), (176, 80), (264, 128)];
    let strips = [(8, 64), (80, 128), (208, 64), (272, 64)];
    [
        (80, adapters(16, 336, &strips)),
        (48, adapters(8, 336, &strips)),
        (32, adapters(32, 128, &[(0, 64), (64, 64)])),
        (48, adapters(40, 128, &[(0, 128)])),
        (5, adapters(3, 11, &[(0, 11)])),
        (33, adapters(8, 40, &[(0, 17), (30, 10)])),
        (7, adapters(4, 12, &[(0, 6), (6, 6)])),
        (1, adapters(1, 3, &[(1, 1)])),
        (35, adapters(16, 264, &[(0, 136), (136, 64), (200, 64)])),
        (65, adapters(8, 400, &five)),
        (34, adapters(40, 96, &[(0, 80), (80, 16)])),
        (33, adapters(24, 1160, &[(0, 72), (80, 1080)])),
        (20, adapters(64, 72, &[(0, 72)])),
    ]
}

/// All shapes in all precisions, each with a seed of its own.
fn cases() -> impl Iterator<Item = (u64, Math, usize, Adapters)> {
    let maths = Math::ALL.into_iter();
    let all = maths.flat_map(|math| shapes().map(|(rows, a)| (math, rows, a)));
    (1..).zip(all).map(|(seed, (m, r, a))| (seed, m, r, a))
}

/// For each row of the stacked `b`: its part, and its column of `y`.
fn rows_of(a: &Adapters) -> Vec<(usize, usize)> {
    let parts = a.parts.iter().enumerate();
    let rows = parts.flat_map(|(p, part)| (0..part.columns).map(move |o| (p, part.first + o)));
    rows.collect()
}

#[test]
fn the_sum_goes_to_the_columns_of_its_part_alone() {
    for (seed, math, rows, adapters) in cases() {
        let a = adapters.clone();
        let op = LoraUp {
            rows,
            adapters,
            math,
        };
        let case = Case::random(op, seed);
        let (s, b) = (numbers(&case.reads[0]), numbers(&case.reads[1]));
        let mut y = numbers(&case.writes[0]);
        for t in 0..rows {
            for (row, (p, column)) in rows_of(&a).into_iter().enumerate() {
                let ranks = 0..a.rank;
                let pair = |k| (s[t * a.ranks() + p * a.rank + k], b[row * a.rank + k]);
                let sum = chain(math, ranks.map(pair));
                let place = &mut y[t * a.n_out + column];
                *place = a.scale.mul_add(sum, *place);
            }
        }
        assert_stored(&case, y);
    }
}

#[test]
fn the_gradient_of_the_lower_product_is_scaled_once() {
    for (seed, math, rows, a) in cases() {
        let op = LoraUpGradInput {
            rows,
            adapters: a.clone(),
            math,
        };
        let case = Case::random(op, seed);
        let (dy, b) = (numbers(&case.reads[0]), numbers(&case.reads[1]));
        let stacked = rows_of(&a);
        let element = |at: usize| {
            let (t, part, k) = (at / a.ranks(), at % a.ranks() / a.rank, at % a.rank);
            let rows = stacked.iter().enumerate().filter(|(_, (p, _))| *p == part);
            let pair = |(row, (_, c)): (usize, &(usize, usize))| {
                (dy[t * a.n_out + c], b[row * a.rank + k])
            };
            chain(math, rows.map(pair)) * a.scale
        };
        assert_stored(&case, (0..rows * a.ranks()).map(element).collect());
    }
}

#[test]
fn the_gradient_of_the_upper_matrix_is_scaled_after_its_pieces_are_folded() {
    for (seed, math, rows, a) in cases() {
        let stacked = rows_of(&a);
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
                math,
            };
            let case = Case::random(op, seed);
            let (dy, s) = (numbers(&case.reads[0]), numbers(&case.reads[1]));
            let element = |at: usize| {
                let ((p, c), k) = (stacked[at / a.rank], at % a.rank);
                let pair = |t| (dy[t * a.n_out + c], s[t * a.ranks() + p * a.rank + k]);
                token_sum(&sum, |tokens| chain(math, tokens.map(pair))) * a.scale
            };
            assert_stored(&case, (0..a.up_rows() * a.rank).map(element).collect());
        }
    }
}

/// So many strips that a GPU's block goes down all rows, further than it reads ahead.
#[test]
fn long_runs_of_rows_have_their_bits() {
    let (rows, columns, rank, math) = (80, 1088 * 64, 16, Math::Bf16);
    let op = LoraUp {
        rows,
        adapters: adapters(rank, columns, &[(0, columns)]),
        math,
    };
    let case = Case::random(op, 5);
    let (s, b) = (numbers(&case.reads[0]), numbers(&case.reads[1]));
    let before = numbers(&case.writes[0]);
    let element = |at: usize| {
        let (t, o) = (at / columns, at % columns);
        let sum = chain(math, (0..rank).map(|k| (s[t * rank + k], b[o * rank + k])));
        1.7_f32.mul_add(sum, before[at])
    };
    assert_stored(&case, (0..rows * columns).map(element).collect());
    let op = LoraDownGradInput {
        rows,
        n_in: columns,
        ranks: rank,
        store: Store::Add,
        math,
    };
    let case = Case::random(op, 6);
    let (ds, a) = (numbers(&case.reads[0]), numbers(&case.reads[1]));
    let before = numbers(&case.writes[0]);
    let element = |at: usize| {
        let (t, i) = (at / columns, at % columns);
        before[at]
            + chain(
                math,
                (0..rank).map(|k| (ds[t * rank + k], a[k * columns + i])),
            )
    };
    assert_stored(&case, (0..rows * columns).map(element).collect());
}

const LOWER: [[usize; 3]; 10] = [
    [1, 1, 1],
    [7, 33, 4],
    [40, 64, 24],
    [70, 72, 48],
    [48, 320, 16],
    [80, 64, 48],
    [32, 128, 32],
    [16, 64, 8],
    [33, 1160, 16],
    [20, 136, 64],
];

#[test]
fn the_lower_product_and_its_input_gradient_have_their_bits() {
    let all = Math::ALL.into_iter().flat_map(|m| LOWER.map(|s| (m, s)));
    for (seed, (math, [rows, n_in, ranks])) in (1..).zip(all) {
        let op = LoraDown {
            rows,
            n_in,
            ranks,
            math,
        };
        let case = Case::random(op, seed);
        let (x, a) = (numbers(&case.reads[0]), numbers(&case.reads[1]));
        let element = |at: usize| {
            let (t, k) = (at / ranks, at % ranks);
            chain(math, (0..n_in).map(|i| (x[t * n_in + i], a[k * n_in + i])))
        };
        assert_stored(&case, (0..rows * ranks).map(element).collect());
        for store in [Store::Assign, Store::Add] {
            let op = LoraDownGradInput {
                rows,
                n_in,
                ranks,
                store,
                math,
            };
            let case = Case::random(op, seed);
            let (ds, a) = (numbers(&case.reads[0]), numbers(&case.reads[1]));
            let before = numbers(&case.writes[0]);
            let element = |at: usize| {
                let (t, i) = (at / n_in, at % n_in);
                let pairs = (0..ranks).map(|k| (ds[t * ranks + k], a[k * n_in + i]));
                match store {
                    Store::Assign => chain(math, pairs),
                    Store::Add => before[at] + chain(math, pairs),
                }
            };
            assert_stored(&case, (0..rows * n_in).map(element).collect());
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
        math: Math::F32,
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
        math: Math::F32,
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
            assert_bits(&case, &[Values::stored(math.storage(), &numbers)]);
        }
    }
}

#[test]
fn a_frozen_table_gives_its_rows_widened() {
    for (rows, vocab_size, d_model) in [(1, 1, 1), (9, 5, 8), (40, 33, 72), (6, 4, 300)] {
        for math in Math::ALL {
            let op = EmbedFrozen {
                rows,
                vocab_size,
                d_model,
                math,
            };
            let ids = Numbers::new(7).ids(rows, vocab_size);
            let case = Case::random(op, 3).with("ids", ids);
            let table = case.reads[1].widened();
            let table = table.f32s();
            let rows = case.reads[0].i32s().iter();
            let row = |&id: &i32| table[id as usize * d_model..][..d_model].to_vec();
            let x: Vec<f32> = rows.flat_map(row).collect();
            assert_bits(&case, &[Values::F32(x)]);
        }
    }
}
