//! Linear layers against their formulas, element by element, through the ops.

use bitstep::num::tree::TokenSum;
use bitstep::op::Store;
use bitstep::op::matmul::{Matmul, MatmulGradInput, MatmulGradWeight};
use bitstep::shape::Math;

use super::runner::{Case, Numbers, Values, assert_bits, devices, run};

/// `fma` over pairs in order, from +0.0.
fn chain(pairs: impl Iterator<Item = (f32, f32)>) -> f32 {
    pairs.fold(0.0, |acc, (a, b)| a.mul_add(b, acc))
}

/// The balanced tree by its recursive definition.
fn tree(leaves: &[f32]) -> f32 {
    match leaves {
        [] => 0.0,
        [leaf] => *leaf,
        _ => {
            let (left, right) = leaves.split_at(leaves.len().next_power_of_two() / 2);
            tree(left) + tree(right)
        }
    }
}

/// (rows, inputs, outputs).
const SIZES: [[usize; 3]; 7] = [
    [1, 1, 1],
    [1, 64, 33],
    [7, 3, 5],
    [31, 130, 48],
    [65, 17, 129],
    [96, 200, 100],
    [200, 400, 20],
];

#[test]
fn the_forward_bits_are_those_of_the_formula() {
    for (seed, [rows, n_in, n_out]) in (1..).zip(SIZES) {
        for bias in [false, true] {
            let case = Case::random(
                Matmul {
                    math: Math::F32,
                    rows,
                    n_in,
                    n_out,
                    bias,
                },
                seed,
            );
            let (x, weight) = (case.reads[0].f32s(), case.reads[1].f32s());
            let element = |t: usize, o: usize| {
                let row = x[t * n_in..][..n_in].iter().copied();
                let sum = chain(row.zip(weight[o * n_in..][..n_in].iter().copied()));
                match bias {
                    true => sum + case.reads[2].f32s()[o],
                    false => sum,
                }
            };
            let y = (0..rows * n_out).map(|i| element(i / n_out, i % n_out));
            assert_bits(&case, &[Values::F32(y.collect())]);
        }
    }
}

#[test]
fn the_bits_of_the_input_gradient_are_those_of_the_formula() {
    for (seed, [rows, n_in, n_out]) in (1..).zip(SIZES) {
        let case = Case::random(
            MatmulGradInput {
                math: Math::F32,
                rows,
                n_in,
                n_out,
            },
            seed,
        );
        let (dy, weight) = (case.reads[0].f32s(), case.reads[1].f32s());
        let element = |t: usize, i: usize| {
            chain((0..n_out).map(|o| (dy[t * n_out + o], weight[o * n_in + i])))
        };
        let dx = (0..rows * n_in).map(|at| element(at / n_in, at % n_in));
        assert_bits(&case, &[Values::F32(dx.collect())]);
    }
}

/// Grains and pieces that do not divide each other or the tokens.
fn cuts(tokens: usize) -> [TokenSum; 5] {
    [(tokens, tokens), (40, 16), (13, 13), (64, 5), (tokens, 7)].map(|(grain, piece)| TokenSum {
        tokens,
        grain,
        piece,
    })
}

#[test]
fn the_bits_of_the_weight_gradient_are_those_of_the_formula() {
    for (seed, [tokens, n_in, n_out]) in (1..).zip(SIZES) {
        for sum in cuts(tokens) {
            for store in [Store::Assign, Store::Add] {
                let op = MatmulGradWeight {
                    math: Math::F32,
                    n_in,
                    n_out,
                    sum,
                    store,
                };
                let case = Case::random(op, seed);
                let (dy, x) = (case.reads[0].f32s(), case.reads[1].f32s());
                let before = case.writes[0].f32s();
                let element = |at: usize| {
                    let (o, i) = (at / n_in, at % n_in);
                    let piece = |first: usize, end: usize| {
                        chain((first..end).map(|t| (dy[t * n_out + o], x[t * n_in + i])))
                    };
                    let grain = |first: usize| {
                        let end = (first + sum.grain).min(tokens);
                        let starts = (first..end).step_by(sum.piece);
                        let pieces: Vec<f32> =
                            starts.map(|s| piece(s, (s + sum.piece).min(end))).collect();
                        tree(&pieces)
                    };
                    let grains: Vec<f32> = (0..tokens).step_by(sum.grain).map(grain).collect();
                    match store {
                        Store::Assign => tree(&grains),
                        Store::Add => before[at] + tree(&grains),
                    }
                };
                let dweight = (0..n_in * n_out).map(element);
                assert_bits(&case, &[Values::F32(dweight.collect())]);
            }
        }
    }
}

#[test]
fn the_order_of_a_sum_shows_in_its_bits() {
    // Without this, a comparison could not tell one order of a sum from another.
    let of = |piece| {
        let tokens = 96;
        let sum = TokenSum {
            tokens,
            grain: tokens,
            piece,
        };
        let op = MatmulGradWeight {
            math: Math::F32,
            n_in: 8,
            n_out: 8,
            sum,
            store: Store::Assign,
        };
        let mut numbers = Numbers::new(5);
        let case = Case::random(op, 1).with("dy", numbers.ordinary(tokens * 8));
        run(&case.with("x", numbers.ordinary(tokens * 8))).remove(0)
    };
    assert_ne!(of(96).f32s(), of(32).f32s());
}

#[test]
fn operands_of_another_size_are_refused() {
    let op = Matmul {
        math: Math::F32,
        rows: 5,
        n_in: 4,
        n_out: 3,
        bias: true,
    };
    let case = Case::random(op, 1);
    for (operand, n) in [("x", 19), ("weight", 11), ("bias", 2), ("y", 14)] {
        let refused = devices()[0].run(&case.clone().resized(operand, n)).err();
        assert!(
            format!("{refused:?}").contains("OperandSize"),
            "{operand}: {refused:?}"
        );
    }
}
