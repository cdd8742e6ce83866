//! Every path against the rule's own chain, over random and adversarial numbers.

use super::*;
use crate::cpu::simd::SimdPath;
use crate::num::round::{f32_to_bf16, f32_to_f16};
use crate::num::tensor_step::chain;
use crate::num::tree::tree_sum;

/// Where the exponents of a case's numbers lie, and what else is among them.
#[derive(Clone, Copy, Debug)]
enum Spread {
    Narrow,
    Wide,
    /// The whole format: subnormal numbers, the largest, zeros of both signs.
    Ends,
    /// A few infinities and NaNs besides.
    Special,
}

struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(0x5851_f42d);
        (self.0 >> 32) as u32
    }

    fn value(&mut self, kind: Kind, spread: Spread) -> f32 {
        let (bits, roll) = (self.next(), self.next() % 1000);
        let around = |width: u32| {
            let exponent = 127 - width / 2 + self.0 as u32 % width;
            f32::from_bits(bits & 0x807f_ffff | exponent << 23)
        };
        let x = match spread {
            Spread::Narrow => around(6),
            Spread::Wide => around(60),
            Spread::Ends | Spread::Special => match (kind, roll % 4) {
                (Kind::F16, 0..3) => f16_to_f32(bits as u16),
                (_, 0..2) => f32::from_bits(bits),
                (_, 2) => f32::from_bits(bits & 0x807f_ffff),
                _ => f32::from_bits(bits & 0x807f_ffff | 0x7e80_0000),
            },
        };
        let x = kind.round(if roll < 40 { x * 0.0 } else { x });
        match spread {
            Spread::Special if roll >= 990 => {
                [f32::NAN, f32::INFINITY, -f32::INFINITY][roll as usize % 3]
            }
            _ if x.is_finite() => x,
            _ => kind.round(f32::from_bits(bits & 0xc07f_ffff | 0x3f00_0000)),
        }
    }

    fn values(&mut self, n: usize, kind: Kind, spread: Spread) -> Vec<f32> {
        (0..n).map(|_| self.value(kind, spread)).collect()
    }
}

fn contexts() -> Vec<CpuContext> {
    let paths = SimdPath::available().into_iter();
    let with = |p| [1, 3].map(|t| CpuContext::new(p, t).expect("a thread pool"));
    paths.flat_map(with).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// What the rule gives, output by output.
fn by_rule(gemm: &TensorGemm, start: &[f32]) -> Vec<f32> {
    let (m, n, k) = (gemm.m(), gemm.n(), gemm.k());
    let output = |i: usize| {
        let (row, col) = (i / n, i % n);
        let a: Vec<f32> = (0..k).map(|p| gemm.left(row, p)).collect();
        let b: Vec<f32> = (0..k).map(|p| gemm.right(p, col)).collect();
        let of = |start: f32, ks: std::ops::Range<usize>| {
            chain(gemm.kind, start, &a[ks.clone()], &b[ks])
        };
        let sum = match gemm.sum {
            TensorSum::Chain => of(0.0, 0..k),
            TensorSum::Continue => of(start[i], 0..k),
            TensorSum::Tokens(tokens) => {
                let grains = tokens.grains().map(|grain| {
                    let pieces: Vec<f32> = grain.map(|ks| of(0.0, ks)).collect();
                    tree_sum(pieces)
                });
                tree_sum(grains)
            }
        };
        let value = gemm.bias.map_or(sum, |bias| sum + bias[col]);
        match gemm.store {
            Store::Assign => value,
            Store::Add => start[i] + value,
        }
    };
    (0..m * n).map(output).collect()
}

/// The operands of a form, tight.
fn operands<'a>(
    form: Form,
    [m, n, k]: [usize; 3],
    a: Elements<'a>,
    b: Elements<'a>,
) -> (TensorMat<'a>, TensorMat<'a>) {
    let (a_shape, b_shape) = match form {
        Form::Nt => ((m, k), (n, k)),
        Form::Nn => ((m, k), (k, n)),
        Form::Tn => ((k, m), (k, n)),
    };
    (
        TensorMat::tight(a, a_shape.0, a_shape.1),
        TensorMat::tight(b, b_shape.0, b_shape.1),
    )
}

fn assert_every_path(gemm: &TensorGemm, start: &[f32], what: &str) {
    let expected = bits(&by_rule(gemm, start));
    for context in contexts() {
        let mut c = start.to_vec();
        let (m, n) = (gemm.m(), gemm.n());
        tensor_gemm(&context, gemm, MatMut::tight(&mut c, m, n)).expect("a product");
        let found = bits(&c);
        let same = |(f, e): (&u32, &u32)| {
            f == e || (f32::from_bits(*f).is_nan() && f32::from_bits(*e).is_nan())
        };
        let wrong = found.iter().zip(&expected).position(|pair| !same(pair));
        if let Some(i) = wrong {
            let (path, threads) = (context.path(), context.threads());
            panic!(
                "{what} {path} {threads}: {i}: {:08x} instead of {:08x}",
                found[i], expected[i]
            );
        }
    }
}

#[test]
fn every_path_and_form_gives_the_rules_bits() {
    let mut numbers = Numbers(3);
    for kind in Kind::ALL {
        for form in [Form::Nt, Form::Nn, Form::Tn] {
            for spread in [Spread::Narrow, Spread::Wide, Spread::Ends, Spread::Special] {
                for shape in [[1, 1, 1], [5, 37, 75], [33, 18, 300], [2, 3, 0]] {
                    let [m, n, k] = shape;
                    let a = numbers.values(m * k, kind, spread);
                    let b = numbers.values(n * k, kind, spread);
                    let start = numbers.values(m * n, Kind::Tf32, spread);
                    let (a, b) = operands(form, shape, Elements::F32(&a), Elements::F32(&b));
                    for sum in [TensorSum::Chain, TensorSum::Continue] {
                        let gemm = TensorGemm {
                            kind,
                            form,
                            a,
                            b,
                            bias: None,
                            sum,
                            store: Store::Assign,
                        };
                        assert_every_path(
                            &gemm,
                            &start,
                            &format!("{kind:?} {form:?} {spread:?} {shape:?} {sum:?}"),
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn pieces_grains_bias_and_both_stores() {
    let mut numbers = Numbers(5);
    let shape = [9, 20, 200];
    let [m, n, k] = shape;
    let a = numbers.values(m * k, Kind::Bf16, Spread::Narrow);
    let b = numbers.values(n * k, Kind::Bf16, Spread::Narrow);
    let (bias, start) = (
        numbers.values(n, Kind::Tf32, Spread::Narrow),
        numbers.values(m * n, Kind::Tf32, Spread::Narrow),
    );
    let (a, b) = operands(Form::Tn, shape, Elements::F32(&a), Elements::F32(&b));
    for tokens in [
        TokenSum {
            tokens: k,
            grain: 70,
            piece: 24,
        },
        TokenSum {
            tokens: k,
            grain: k,
            piece: 64,
        },
    ] {
        for store in [Store::Assign, Store::Add] {
            let gemm = TensorGemm {
                kind: Kind::Bf16,
                form: Form::Tn,
                a,
                b,
                bias: Some(&bias),
                sum: TensorSum::Tokens(tokens),
                store,
            };
            assert_every_path(&gemm, &start, &format!("{tokens:?} {store:?}"));
        }
    }
}

#[test]
fn bits_of_sixteen_and_unrounded_numbers_are_read_as_the_format() {
    let mut numbers = Numbers(9);
    let shape = [6, 19, 50];
    let [m, n, k] = shape;
    for (kind, narrow) in [
        (Kind::Bf16, f32_to_bf16 as fn(f32) -> u16),
        (Kind::F16, f32_to_f16),
    ] {
        let raw = |numbers: &mut Numbers, n| numbers.values(n, Kind::Tf32, Spread::Narrow);
        let (a, b) = (raw(&mut numbers, m * k), raw(&mut numbers, n * k));
        let [a16, b16] = [&a, &b].map(|x| x.iter().map(|&x| narrow(x)).collect::<Vec<u16>>());
        let start = vec![0.0; m * n];
        let of = |a, b| {
            let (a, b) = operands(Form::Nt, shape, a, b);
            TensorGemm {
                kind,
                form: Form::Nt,
                a,
                b,
                bias: None,
                sum: TensorSum::Chain,
                store: Store::Assign,
            }
        };
        let narrow = of(Elements::Bits(&a16), Elements::Bits(&b16));
        assert_every_path(&narrow, &start, "16 bits");
        let wide = of(Elements::F32(&a), Elements::F32(&b));
        assert_eq!(
            bits(&by_rule(&narrow, &start)),
            bits(&by_rule(&wide, &start))
        );
    }
}

/// A product with one thing wrong, and the operand that the refusal names.
fn unfit<'a>(
    good: TensorGemm<'a>,
    x: &'a [f32],
    y: &'a [u16],
) -> [(TensorGemm<'a>, &'static str); 9] {
    let mat = |rows, cols| TensorMat::tight(Elements::F32(x), rows, cols);
    let bits = TensorMat::tight(Elements::Bits(y), 2, 3);
    let tokens = TokenSum {
        tokens: 4,
        grain: 4,
        piece: 4,
    };
    let a = |a| TensorGemm { a, ..good };
    let b = |b| TensorGemm { b, ..good };
    let bias = TensorGemm {
        bias: Some(&x[..3]),
        ..good
    };
    let sum = TensorGemm {
        sum: TensorSum::Tokens(tokens),
        ..good
    };
    [
        (b(mat(3, 2)), "b: k"),
        (a(mat(1, 3)), "c: rows"),
        (b(mat(1, 3)), "c: columns"),
        (bias, "bias"),
        (sum, "sum: tokens"),
        (a(bits), "a: bytes of an element"),
        (b(bits), "b: bytes of an element"),
        (
            a(TensorMat {
                stride: 2,
                ..good.a
            }),
            "a: stride",
        ),
        (
            b(TensorMat {
                stride: 4,
                ..good.b
            }),
            "b",
        ),
    ]
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let (x, y) = ([1.0; 6], [0_u16; 6]);
    let good = TensorGemm {
        kind: Kind::Tf32,
        form: Form::Nt,
        a: TensorMat::tight(Elements::F32(&x), 2, 3),
        b: TensorMat::tight(Elements::F32(&x), 2, 3),
        bias: None,
        sum: TensorSum::Chain,
        store: Store::Assign,
    };
    let context = CpuContext::new(SimdPath::Scalar, 1).expect("a thread pool");
    let run = |gemm: TensorGemm| {
        let mut c = [7.0; 4];
        let result = tensor_gemm(&context, &gemm, MatMut::tight(&mut c, 2, 2));
        result.inspect_err(|_| assert_eq!(c, [7.0; 4], "nothing is written"))
    };
    assert_eq!(run(good), Ok(()));
    for (gemm, wanted) in unfit(good, &x, &y) {
        let error = run(gemm);
        let named =
            matches!(error, Err(DeviceError::OperandSize { operand, .. }) if operand == wanted);
        assert!(named, "{wanted}: {error:?}");
    }
}
