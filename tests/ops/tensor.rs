//! Linear layers of the tensor-core domains against a plain chain of steps, element by element; every
//! backward op of these domains beside the one of f32.

use bitstep::num::tensor_step::{Kind, step};
use bitstep::num::tree::TokenSum;
use bitstep::op::bias::BiasGrad;
use bitstep::op::matmul::{Matmul, MatmulGradInput, MatmulGradWeight};
use bitstep::op::rms_norm::RmsNormGrad;
use bitstep::op::rope::{Heads, QkNormRopeGrad};
use bitstep::op::swiglu::{Output, SwiGluGrad};
use bitstep::op::{Op, Store};
use bitstep::shape::Math;

use super::reference::token_sum;
use super::runner::{Case, Device, Numbers, Values, assert_bits, devices, first_difference, run};

/// The maths of tensor cores, with the step of each and the size of its rounding.
pub const KINDS: [(Math, Kind, f32); 3] = [
    (Math::Tf32, Kind::Tf32, 1.0 / 2048.0),
    (Math::Bf16, Kind::Bf16, 1.0 / 256.0),
    (Math::F16, Kind::F16, 1.0 / 2048.0),
];

/// The chain of steps over pairs in order from `acc`, the last step padded with zeros.
pub fn chain(kind: Kind, mut acc: f32, pairs: impl Iterator<Item = (f32, f32)>) -> f32 {
    let pairs: Vec<(f32, f32)> = pairs.collect();
    let k = if kind == Kind::Tf32 { 8 } else { 16 };
    for part in pairs.chunks(k) {
        let (mut a, mut b) = ([0.0; 16], [0.0; 16]);
        for (i, &(x, y)) in part.iter().enumerate() {
            (a[i], b[i]) = (kind.round(x), kind.round(y));
        }
        acc = step(kind, acc, &a[..k], &b[..k]);
    }
    acc
}

/// (rows, inputs, outputs).
const SIZES: [[usize; 3]; 7] = [
    [1, 1, 1],
    [1, 64, 33],
    [7, 3, 5],
    [31, 130, 48],
    [65, 17, 129],
    [96, 200, 100],
    [40, 400, 20],
];

/// The f32 contents of an operand.
fn numbers(values: &Values) -> Vec<f32> {
    values.widened().f32s().to_vec()
}

/// Compares with f32 numbers that are rounded to what the first written operand stores.
fn assert_stored(case: &Case, numbers: Vec<f32>) {
    let dtype = case.op.rule().signature().writes[0].dtype;
    assert_bits(case, &[Values::stored(dtype, &numbers)]);
}

#[test]
fn the_forward_is_a_chain_of_steps_plus_bias_rounded_once() {
    for (math, kind, _) in KINDS {
        for (seed, [rows, n_in, n_out]) in (1..).zip(SIZES) {
            for bias in [false, true] {
                let op = Matmul {
                    rows,
                    n_in,
                    n_out,
                    bias,
                    math,
                };
                let case = Case::random(op, seed);
                let (x, weight) = (numbers(&case.reads[0]), numbers(&case.reads[1]));
                let element = |at: usize| {
                    let (t, o) = (at / n_out, at % n_out);
                    let pairs = (0..n_in).map(|i| (x[t * n_in + i], weight[o * n_in + i]));
                    let sum = chain(kind, 0.0, pairs);
                    match bias {
                        true => sum + case.reads[2].f32s()[o],
                        false => sum,
                    }
                };
                assert_stored(&case, (0..rows * n_out).map(element).collect());
            }
        }
    }
}

#[test]
fn the_input_gradient_is_a_chain_of_steps_rounded_once() {
    for (math, kind, _) in KINDS {
        for (seed, [rows, n_in, n_out]) in (1..).zip(SIZES) {
            let op = MatmulGradInput {
                rows,
                n_in,
                n_out,
                math,
            };
            let case = Case::random(op, seed);
            let (dy, weight) = (numbers(&case.reads[0]), numbers(&case.reads[1]));
            let element = |at: usize| {
                let (t, i) = (at / n_in, at % n_in);
                let pairs = (0..n_out).map(|o| (dy[t * n_out + o], weight[o * n_in + i]));
                chain(kind, 0.0, pairs)
            };
            assert_stored(&case, (0..rows * n_in).map(element).collect());
        }
    }
}

/// Products of so many rows and columns that a large device computes them by warpgroups, with tiles of 256, 192 and 128
/// columns, against the CPU's.
#[test]
fn large_products_of_a_gpu_have_the_bits_of_the_cpu() {
    let Some(gpu) = crate::gpu::backend() else {
        return;
    };
    let [.., cpu, _] = devices() else {
        unreachable!("the CPU has several devices, and the GPU is the last");
    };
    for (seed, (math, columns)) in (1..).zip([
        (Math::Bf16, 1024),
        (Math::F16, 768),
        (Math::Bf16, 640),
        (Math::F16, 1280),
    ]) {
        let (rows, terms) = (2304, 192 + 64 * (seed as usize % 2));
        let forward = Matmul {
            rows,
            n_in: terms,
            n_out: columns,
            bias: false,
            math,
        };
        let back = MatmulGradInput {
            rows,
            n_in: columns,
            n_out: terms,
            math,
        };
        for case in [Case::random(forward, seed), Case::random(back, seed)] {
            let expected = cpu.run(&case).expect("the case runs");
            let found = gpu.run(&case).expect("the case runs");
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!(first_difference(found, expected), None, "{}", case.op);
            }
        }
    }
}

/// A weight gradient in a tensor-core domain, of tokens in grains and pieces, against its formula.
fn assert_weight_gradient(
    (math, kind): (Math, Kind),
    [n_in, n_out]: [usize; 2],
    ([tokens, grain, piece], store): ([usize; 3], Store),
    seed: u64,
) {
    let sum = TokenSum {
        tokens,
        grain,
        piece,
    };
    let op = MatmulGradWeight {
        n_in,
        n_out,
        sum,
        store,
        math,
    };
    let case = Case::random(op, seed);
    let (dy, x) = (numbers(&case.reads[0]), numbers(&case.reads[1]));
    let before = case.writes[0].f32s();
    let element = |at: usize| {
        let (o, i) = (at / n_in, at % n_in);
        let pair = |t| (dy[t * n_out + o], x[t * n_in + i]);
        let total = token_sum(&sum, |piece| chain(kind, 0.0, piece.map(pair)));
        match store {
            Store::Assign => total,
            Store::Add => before[at] + total,
        }
    };
    assert_stored(&case, (0..n_in * n_out).map(element).collect());
}

#[test]
fn the_weight_gradient_is_f32_and_a_chain_of_steps_a_piece() {
    for (math, kind, _) in KINDS {
        for (seed, [tokens, n_in, n_out]) in (1..).zip(SIZES) {
            for ((grain, piece), store) in [
                ((tokens, tokens), Store::Assign),
                ((40, 16), Store::Add),
                ((13, 5), Store::Assign),
            ] {
                let sum = ([tokens, grain, piece], store);
                assert_weight_gradient((math, kind), [n_in, n_out], sum, seed);
            }
        }
    }
}

/// Few rows of weights, as adapters' lower matrices have: few pieces, many, and more than one tree folds at once.
#[test]
fn the_gradient_of_few_rows_is_the_same_sum() {
    let cuts = [(64, 64, 16), (300, 300, 19), (150, 16, 4)];
    for (math, kind, _) in KINDS {
        for (seed, [n_in, n_out]) in (1..).zip([[72, 8], [136, 24], [64, 48]]) {
            for ((tokens, grain, piece), store) in
                cuts.into_iter()
                    .zip([Store::Add, Store::Assign, Store::Add])
            {
                let sum = ([tokens, grain, piece], store);
                assert_weight_gradient((math, kind), [n_in, n_out], sum, seed);
            }
        }
    }
}

/// The largest difference of two operands, relative to the largest element of the second.
pub fn relative_difference(found: &Values, exact: &Values) -> f32 {
    let (found, exact) = (numbers(found), numbers(exact));
    let largest = exact.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
    assert!(largest > 0.0 && found.iter().all(|x| x.is_finite()));
    let pairs = found.iter().zip(&exact);
    pairs.fold(0.0_f32, |m, (a, b)| m.max((a - b).abs())) / largest
}

const SUM: TokenSum = TokenSum {
    tokens: 24,
    grain: 12,
    piece: 8,
};
const HEADS: Heads = Heads {
    n_heads: 3,
    n_kv_heads: 1,
    head_dim: 10,
};

fn backward_ops() -> Vec<Op> {
    let (rows, math, n_in, n_out) = (SUM.tokens, Math::F32, 40, 30);
    vec![
        MatmulGradInput {
            rows,
            n_in,
            n_out,
            math,
        }
        .into(),
        MatmulGradWeight {
            n_in,
            n_out,
            sum: SUM,
            store: Store::Add,
            math,
        }
        .into(),
        BiasGrad {
            n_out,
            sum: SUM,
            math,
        }
        .into(),
        RmsNormGrad {
            d_model: 37,
            sum: SUM,
            store: Store::Add,
            weight_grad: true,
            delta_grad: false,
            math,
        }
        .into(),
        QkNormRopeGrad {
            seq_len: 12,
            heads: HEADS,
            sum: SUM,
            weight_grad: true,
            math,
        }
        .into(),
        SwiGluGrad {
            rows,
            d_ff: 19,
            output: Output::Left,
            math,
        }
        .into(),
    ]
}

/// The same numbers in f32 and in a narrow math differ by the rounding of operands and results alone:
/// by at most four roundings of the largest element, and by more than a hundredth of one.
#[test]
fn gradients_are_those_of_f32_within_the_rounding_of_the_storage() {
    for op in backward_ops() {
        let signature = op.rule().signature();
        let mut numbers = Numbers::new(21);
        let mut exact = Case::random(op.clone(), 0);
        for operand in signature.reads.iter().chain(&signature.writes) {
            exact = exact.with(operand.name, numbers.ordinary(operand.shape.elements()));
        }
        for (math, _, rounding) in KINDS {
            let narrow = exact.in_math(math);
            let found = run(&narrow);
            let expected = run(&exact);
            let outputs = narrow.op.rule().signature().writes;
            for (operand, expected) in signature.writes.iter().zip(&expected) {
                let index = outputs.iter().position(|o| o.name == operand.name);
                let found = &found[index.expect("a written operand of the f32 op")];
                let difference = relative_difference(found, expected);
                let what = format!("{}, {}: {difference:e}", narrow.op, operand.name);
                assert!(difference <= 4.0 * rounding, "{what}");
                let rounds = math.storage() != bitstep::shape::DType::F32
                    || matches!(op, Op::MatmulGradInput(_) | Op::MatmulGradWeight(_));
                assert_eq!(difference > 0.01 * rounding, rounds, "{what}");
            }
        }
    }
}
