//! Products compared with the definition: one naive chain an output.

use super::*;
use crate::cpu::simd::SimdPath;

/// Values that are exact in few bits but spread over many exponents, of both signs, so that a
/// change of order or an extra rounding shows.
fn values(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let mantissa = (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
            mantissa * 2f32.powi((state & 15) as i32 - 8)
        })
        .collect()
}

/// A case that owns its operands.
struct Case {
    form: Form,
    m: usize,
    n: usize,
    k: usize,
    a: Vec<f32>,
    b: Vec<f32>,
    bias: Option<Vec<f32>>,
    sum: Option<TokenSum>,
    store: Store,
    /// Floats between the rows of every matrix.
    gap: usize,
}

impl Case {
    fn new(form: Form, m: usize, n: usize, k: usize) -> Self {
        Case {
            form,
            m,
            n,
            k,
            a: values(1 + m as u64, m * k),
            b: values(2 + n as u64, n * k),
            bias: None,
            sum: None,
            store: Store::Assign,
            gap: 0,
        }
    }

    /// Rows and columns of A and of B.
    fn extents(&self) -> [(usize, usize); 2] {
        let (m, n, k) = (self.m, self.n, self.k);
        match self.form {
            Form::Nt => [(m, k), (n, k)],
            Form::Nn => [(m, k), (k, n)],
            Form::Tn => [(k, m), (k, n)],
        }
    }

    /// The definition: chains in ascending k, cut and folded by the sum's own scalar code.
    fn expected(&self, before: &[f32]) -> Vec<f32> {
        let [(_, a_cols), (_, b_cols)] = self.extents();
        let element = |i: usize, j: usize, p: usize| match self.form {
            Form::Nt => (self.a[i * a_cols + p], self.b[j * b_cols + p]),
            Form::Nn => (self.a[i * a_cols + p], self.b[p * b_cols + j]),
            Form::Tn => (self.a[p * a_cols + i], self.b[p * b_cols + j]),
        };
        let output = |at: usize| {
            let (i, j) = (at / self.n, at % self.n);
            let chain = |range: std::ops::Range<usize>| {
                range
                    .map(|p| element(i, j, p))
                    .fold(0.0f32, |acc, (a, b)| a.mul_add(b, acc))
            };
            let sum = self.sum.map_or_else(|| chain(0..self.k), |s| s.sum(chain));
            let sum = self.bias.as_ref().map_or(sum, |bias| sum + bias[j]);
            match self.store {
                Store::Assign => sum,
                Store::Add => before[at] + sum,
            }
        };
        (0..self.m * self.n).map(output).collect()
    }

    /// Runs the product on rows `gap` apart and returns them tight.
    fn computed(&self, context: &CpuContext, before: &[f32]) -> Vec<f32> {
        let [(a_rows, a_cols), (b_rows, b_cols)] = self.extents();
        let (a, b) = (
            spread(&self.a, a_rows, a_cols, self.gap),
            spread(&self.b, b_rows, b_cols, self.gap),
        );
        let mut c = spread(before, self.m, self.n, self.gap);
        let product = Gemm {
            form: self.form,
            a: Mat {
                data: &a,
                rows: a_rows,
                cols: a_cols,
                stride: a_cols + self.gap,
            },
            b: Mat {
                data: &b,
                rows: b_rows,
                cols: b_cols,
                stride: b_cols + self.gap,
            },
            bias: self.bias.as_deref(),
            sum: self.sum,
            store: self.store,
        };
        let stride = self.n + self.gap;
        let out = MatMut {
            data: &mut c,
            rows: self.m,
            cols: self.n,
            stride,
        };
        gemm(context, &product, out).unwrap();
        let gaps = c
            .chunks(stride.max(1))
            .flat_map(|row| &row[self.n.min(row.len())..]);
        assert!(gaps.clone().all(|x| *x == GAP), "a gap was written");
        c.chunks(stride.max(1))
            .flat_map(|row| row[..self.n.min(row.len())].to_vec())
            .collect()
    }

    fn check(&self, contexts: &[CpuContext]) {
        let before = match self.store {
            Store::Assign => vec![f32::NAN; self.m * self.n],
            Store::Add => values(3, self.m * self.n),
        };
        let expected = bits(&self.expected(&before));
        for context in contexts {
            let found = bits(&self.computed(context, &before));
            let (path, threads) = (context.path(), context.threads());
            let Case {
                form, m, n, k, sum, ..
            } = self;
            assert!(
                found == expected,
                "{form:?} {m} x {n} x {k}, {sum:?}, {path}, {threads} threads"
            );
        }
    }
}

/// What stands in the gaps between rows.
const GAP: f32 = 77.0;

fn spread(tight: &[f32], rows: usize, cols: usize, gap: usize) -> Vec<f32> {
    let row = |r: usize| {
        let row = tight[r * cols..][..cols].iter().copied();
        row.chain(std::iter::repeat_n(GAP, gap))
    };
    (0..rows).flat_map(row).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn contexts(threads: &[usize]) -> Vec<CpuContext> {
    let paths = SimdPath::available();
    let all = paths
        .iter()
        .flat_map(|&p| threads.iter().map(move |&t| (p, t)));
    all.map(|(p, t)| CpuContext::new(p, t).unwrap()).collect()
}

const FORMS: [Form; 3] = [Form::Nt, Form::Nn, Form::Tn];

#[test]
fn small_and_ragged_shapes_are_the_naive_chain() {
    let contexts = contexts(&[1]);
    for form in FORMS {
        for m in [1, 2, 5, 8, 13, 40] {
            for n in [1, 3, 15, 16, 17, 33, 40] {
                for k in [0, 1, 7, 8, 31, 40] {
                    let mut case = Case::new(form, m, n, k);
                    case.gap = (m + n) % 3;
                    case.check(&contexts);
                }
            }
        }
    }
}

#[test]
fn threads_and_blocks_do_not_change_a_bit() {
    let contexts = contexts(&[1, 2, 7, 64]);
    for form in FORMS {
        for (m, n, k) in [
            (131, 67, 211),
            (3, 409, 389),
            (17, 1000, 64),
            (523, 31, 193),
        ] {
            Case::new(form, m, n, k).check(&contexts);
        }
    }
}

#[test]
fn empty_results_and_empty_sums_are_defined() {
    let contexts = contexts(&[1, 7]);
    for form in FORMS {
        for (m, n, k) in [(0, 5, 3), (5, 0, 3), (0, 0, 0), (5, 4, 0)] {
            let mut case = Case::new(form, m, n, k);
            case.sum = Some(TokenSum {
                tokens: k,
                grain: 2,
                piece: 1,
            });
            case.check(&contexts);
            case.bias = Some(vec![-0.0; n]);
            case.check(&contexts);
        }
    }
}

#[test]
fn a_bias_comes_once_after_the_chain_and_before_the_store() {
    let contexts = contexts(&[1, 2]);
    for form in FORMS {
        for store in [Store::Assign, Store::Add] {
            let mut case = Case::new(form, 77, 53, 201);
            case.bias = Some(values(9, 53));
            case.store = store;
            case.check(&contexts);
        }
    }
}

#[test]
fn pieces_and_grains_are_folded_by_the_tree() {
    let contexts = contexts(&[1, 2, 7]);
    for (tokens, grain, piece) in [
        (410, 410, 64),
        (410, 100, 32),
        (410, 37, 37),
        (410, 150, 210),
        (411, 3, 2),
        (450, 450, 210),
    ] {
        for (m, n) in [(65, 50), (9, 400)] {
            for store in [Store::Assign, Store::Add] {
                let mut case = Case::new(Form::Tn, m, n, tokens);
                case.sum = Some(TokenSum {
                    tokens,
                    grain,
                    piece,
                });
                case.store = store;
                case.check(&contexts);
                let mut forward = Case::new(Form::Nt, m, n, tokens);
                forward.sum = case.sum;
                forward.check(&contexts[..1]);
            }
        }
    }
}

#[test]
fn the_order_of_k_and_the_cut_are_visible_in_the_bits() {
    let case = Case::new(Form::Nt, 20, 20, 300);
    let before = vec![0.0; 400];
    let ascending = bits(&case.expected(&before));
    let mut reversed = Case::new(Form::Nt, 20, 20, 300);
    let backwards = |data: &[f32]| -> Vec<f32> {
        data.chunks(300)
            .flat_map(|row| row.iter().rev().copied())
            .collect()
    };
    (reversed.a, reversed.b) = (backwards(&case.a), backwards(&case.b));
    assert_ne!(bits(&reversed.expected(&before)), ascending);
    let mut cut = Case::new(Form::Nt, 20, 20, 300);
    cut.sum = Some(TokenSum {
        tokens: 300,
        grain: 300,
        piece: 150,
    });
    assert_ne!(bits(&cut.expected(&before)), ascending);
    for context in contexts(&[1]) {
        assert_eq!(bits(&case.computed(&context, &before)), ascending);
        assert_ne!(bits(&reversed.computed(&context, &before)), ascending);
    }
}

#[test]
fn subnormals_and_signed_zeros_keep_their_bits() {
    let contexts = contexts(&[1]);
    for form in FORMS {
        let mut case = Case::new(form, 9, 19, 23);
        for (i, x) in case.a.iter_mut().enumerate() {
            *x = [1e-30, -0.0, -1e-38, 3e-41, -1e-45, 0.0][i % 6];
        }
        for (i, x) in case.b.iter_mut().enumerate() {
            *x = [1e-9, -1.0, 0.5, -0.0, -1e-5][i % 5];
        }
        case.check(&contexts);
    }
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let context = CpuContext::new(SimdPath::Scalar, 1).unwrap();
    let data = [0.0; 12];
    let good = Gemm {
        form: Form::Nt,
        a: Mat::tight(&data, 3, 4),
        b: Mat::tight(&data, 2, 4),
        bias: None,
        sum: None,
        store: Store::Assign,
    };
    let refusal = |product: Gemm, rows: usize, stride: usize| {
        let mut c = [5.0; 6];
        let out = MatMut {
            data: &mut c,
            rows,
            cols: 2,
            stride,
        };
        let refused = gemm(&context, &product, out);
        assert!(refused.is_ok() || c == [5.0; 6], "a refusal wrote to C");
        refused.err()
    };
    let size = |operand, expected, found| {
        Some(DeviceError::OperandSize {
            operand,
            expected,
            found,
        })
    };
    assert_eq!(refusal(good, 3, 2), None);
    let b = Mat::tight(&data, 2, 5);
    assert_eq!(refusal(Gemm { b, ..good }, 3, 2), size("b: k", 4, 5));
    assert_eq!(refusal(good, 2, 2), size("c: rows", 3, 2));
    assert_eq!(refusal(good, 3, 1), size("c: stride", 2, 1));
    assert_eq!(refusal(good, 3, 3), size("c", 8, 6));
    let a = Mat::tight(&data[..11], 3, 4);
    assert_eq!(refusal(Gemm { a, ..good }, 3, 2), size("a", 12, 11));
    let bias = Some(&data[..3]);
    assert_eq!(refusal(Gemm { bias, ..good }, 3, 2), size("bias", 2, 3));
    let sum = Some(TokenSum {
        tokens: 5,
        grain: 1,
        piece: 1,
    });
    assert_eq!(
        refusal(Gemm { sum, ..good }, 3, 2),
        size("sum: tokens", 4, 5)
    );
    let b = Mat::tight(&data, 3, 4);
    assert_eq!(refusal(Gemm { b, ..good }, 3, 2), size("c: columns", 3, 2));
}
