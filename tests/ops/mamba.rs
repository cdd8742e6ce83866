//! The ops of Mamba: bits against the formulas, faults, and windows that go on.

use std::ops::Range;

use bitstep::error::DeviceError;
use bitstep::num::tree::TokenSum;
use bitstep::op::Op;
use bitstep::op::carry_state::CarryState;
use bitstep::op::conv1d::{Conv1d, Conv1dGrad, ConvShape};
use bitstep::op::scan::{Scan, ScanGrad, ScanShape};
use bitstep::op::split_columns::{SplitColumns, SplitColumnsGrad};
use bitstep::shape::Math;

use super::reference::expected;
use super::runner::{
    Case, Numbers, Values, assert_bits, devices, first_difference, run, with_math,
};

fn check(case: &Case) {
    assert_bits(case, &expected(case));
    for math in [Math::Bf16, Math::F16] {
        if with_math(&case.op, math) != case.op {
            let narrow = case.in_math(math);
            assert_bits(&narrow, &expected(&narrow));
        }
    }
}

/// Batch, positions, channels and taps: one of each; windows shorter than the taps; ragged channels.
const CONVS: [[usize; 4]; 5] = [
    [1, 1, 1, 2],
    [3, 2, 5, 4],
    [2, 7, 33, 3],
    [2, 70, 67, 4],
    [1, 40, 260, 16],
];

pub fn conv_shape([batch, seq_len, d_inner, d_conv]: [usize; 4]) -> ConvShape {
    ConvShape {
        batch,
        seq_len,
        d_inner,
        d_conv,
    }
}

#[test]
fn conv_has_its_bits() {
    for (seed, sizes) in CONVS.into_iter().enumerate() {
        for carried in [false, true] {
            let (shape, math) = (conv_shape(sizes), Math::F32);
            let op = Conv1d {
                shape,
                carried,
                math,
            };
            check(&Case::random(op, seed as u64));
        }
    }
}

#[test]
fn conv_grad_has_its_bits() {
    for (seed, sizes) in CONVS.into_iter().enumerate() {
        for (carried, parts, weight_grad) in [(false, 2, true), (true, 2, true), (true, 1, false)] {
            let shape = conv_shape(sizes);
            let op = Conv1dGrad {
                shape,
                sum: TokenSum {
                    tokens: shape.rows(),
                    grain: shape.seq_len,
                    piece: 32.min(shape.seq_len),
                },
                parts,
                weight_grad,
                carried,
                math: Math::F32,
            };
            check(&Case::random(op, seed as u64));
        }
    }
}

#[test]
fn columns_are_split_and_joined() {
    for (rows, n_left, n_right) in [(1, 1, 1), (7, 3, 32), (300, 48, 17)] {
        let math = Math::F32;
        check(&Case::random(
            SplitColumns {
                rows,
                n_left,
                n_right,
                math,
            },
            1,
        ));
        check(&Case::random(
            SplitColumnsGrad {
                rows,
                n_left,
                n_right,
                math,
            },
            2,
        ));
    }
}

#[test]
fn the_state_is_carried_unless_the_step_is_dropped() {
    for applied in [0, 1] {
        let report = vec![1, 1, 1, applied, 1, 1, 1, 1];
        let case = Case::random(CarryState { elements: 37 }, 3);
        check(&case.with("report", Values::U32(report)));
    }
}

/// Batch, positions, channels, states and chunk: one position; chunks that end with the sequence and that do
/// not; channels beyond one task, and not a multiple of it.
const SCANS: [[usize; 5]; 11] = [
    [1, 1, 1, 1, 64],
    [2, 5, 3, 8, 2],
    [3, 8, 33, 16, 4],
    [1, 70, 5, 64, 64],
    [2, 9, 130, 7, 9],
    [4, 3, 32, 12, 1],
    [2, 70, 36, 16, 64],
    [3, 32, 64, 16, 64],
    [1, 55, 24, 32, 40],
    [2, 33, 70, 8, 16],
    [1, 37, 9, 24, 64],
];

pub fn scan_shape([batch, seq_len, d_inner, d_state, chunk]: [usize; 5]) -> ScanShape {
    ScanShape {
        batch,
        seq_len,
        d_inner,
        d_state,
        chunk,
    }
}

/// A case whose exponents are of ordinary size, so that few results are infinite or not numbers.
fn scan_case(op: impl Into<Op>, shape: &ScanShape, seed: u64) -> Case {
    let a_log = Numbers::new(seed + 100).ordinary(shape.d_inner * shape.d_state);
    Case::random(op, seed).with("a_log", a_log)
}

#[test]
fn scan_has_its_bits() {
    for (seed, sizes) in SCANS.into_iter().enumerate() {
        for carried in [false, true] {
            let (shape, math) = (scan_shape(sizes), Math::F32);
            let op = Scan {
                shape,
                carried,
                math,
            };
            check(&scan_case(op, &shape, seed as u64));
        }
    }
}

#[test]
fn scan_grad_has_its_bits() {
    for (seed, sizes) in SCANS.into_iter().enumerate() {
        for (weight_grad, state_grad, restore, sequences) in [
            (true, false, false, 1),
            (true, true, true, 2),
            (false, true, false, 4),
            (false, false, true, 1),
        ] {
            let shape = scan_shape(sizes);
            let op = ScanGrad {
                shape,
                sum: TokenSum {
                    tokens: shape.rows(),
                    grain: (sequences * shape.seq_len).min(shape.rows()),
                    piece: shape.seq_len,
                },
                weight_grad,
                state_grad,
                restore,
                math: Math::F32,
            };
            check(&scan_case(op, &shape, seed as u64));
        }
    }
}

/// What backward writes of the output is what forward has written.
#[test]
fn a_restored_output_of_the_scan_has_the_bits_of_forward() {
    for math in [Math::F32, Math::Bf16, Math::F16] {
        let (shape, carried) = (scan_shape([2, 21, 9, 8, 4]), false);
        let (rows, d, n) = (shape.rows(), shape.d_inner, shape.d_state);
        let mut numbers = Numbers::new(71);
        let sizes = [
            ("u", rows * d),
            ("dt", rows * d),
            ("bc", rows * 2 * n),
            ("xz", rows * 2 * d),
        ];
        let stored = sizes.map(|(name, size)| {
            let values = numbers.ordinary(size);
            (name, Values::stored(math.storage(), values.f32s()))
        });
        let (a_log, others) = (numbers.ordinary(d * n), numbers.ordinary(d));
        let with = |case: Case| {
            let case = stored
                .iter()
                .fold(case, |case, (name, values)| case.with(name, values.clone()));
            let case = case.with("a_log", a_log.clone());
            case.with("skip", others.clone())
                .with("dt_bias", others.clone())
        };
        let scan = Scan {
            shape,
            carried,
            math,
        };
        let forward = run(&with(Case::random(scan, 1)));
        let op = ScanGrad {
            shape,
            sum: TokenSum {
                tokens: rows,
                grain: rows,
                piece: shape.seq_len,
            },
            weight_grad: true,
            state_grad: false,
            restore: true,
            math,
        };
        let starts = forward[1].clone();
        let found = run(&with(Case::random(op, 2)).with("starts", starts));
        let restored = found.last().expect("an output");
        assert_eq!(first_difference(restored, &forward[0]), None, "{math}");
    }
}

fn one_of_each() -> Vec<Op> {
    let conv = conv_shape([2, 6, 5, 4]);
    let scan = scan_shape([2, 6, 5, 8, 4]);
    let (math, carried, weight_grad) = (Math::F32, true, true);
    let sum = TokenSum {
        tokens: 12,
        grain: 12,
        piece: 6,
    };
    vec![
        Conv1d {
            shape: conv,
            carried,
            math,
        }
        .into(),
        Conv1dGrad {
            shape: conv,
            sum,
            parts: 2,
            weight_grad,
            carried,
            math,
        }
        .into(),
        Scan {
            shape: scan,
            carried,
            math,
        }
        .into(),
        ScanGrad {
            shape: scan,
            sum,
            weight_grad,
            state_grad: true,
            restore: true,
            math,
        }
        .into(),
        SplitColumns {
            rows: 3,
            n_left: 2,
            n_right: 5,
            math,
        }
        .into(),
        SplitColumnsGrad {
            rows: 3,
            n_left: 2,
            n_right: 5,
            math,
        }
        .into(),
        CarryState { elements: 9 }.into(),
    ]
}

#[test]
fn an_operand_of_another_size_is_named() {
    for op in one_of_each() {
        let signature = op.rule().signature();
        for operand in signature.reads.iter().chain(&signature.writes) {
            // The report is read whole as its words.
            if operand.name == "report" {
                continue;
            }
            let expected = operand.shape.elements();
            for found in [expected - 1, expected + 1] {
                let case = Case::random(op.clone(), 5).resized(operand.name, found);
                let error = devices()[0].run(&case).err();
                let refused = DeviceError::OperandSize {
                    operand: operand.name,
                    expected,
                    found,
                };
                assert_eq!(error, Some(refused), "{op}, {}", operand.name);
            }
        }
    }
}

#[test]
fn pieces_that_are_not_sequences_are_refused() {
    let shape = scan_shape([2, 6, 5, 8, 4]);
    let sum = TokenSum {
        tokens: 12,
        grain: 12,
        piece: 4,
    };
    let op = ScanGrad {
        shape,
        sum,
        weight_grad: true,
        state_grad: false,
        restore: false,
        math: Math::F32,
    };
    let refused = DeviceError::OperandSize {
        operand: "pieces",
        expected: 2,
        found: 3,
    };
    assert_eq!(devices()[0].run(&Case::random(op, 5)).err(), Some(refused));
}

/// The rows `positions` of every sequence of `[batch · len, columns]`.
fn rows_of(values: &Values, (len, columns): (usize, usize), positions: Range<usize>) -> Values {
    let sequences = values.f32s().chunks(len * columns);
    let part = |s: &[f32]| s[positions.start * columns..positions.end * columns].to_vec();
    Values::F32(sequences.flat_map(part).collect())
}

/// What both ops read over whole sequences.
struct Sequences {
    xz: Values,
    dt: Values,
    bc: Values,
    /// Of the convolution and of the scan, by operand.
    weights: [Vec<(&'static str, Values)>; 2],
}

/// Batch, positions, channels, states and taps.
const SIZES: [usize; 5] = [2, 11, 37, 9, 4];

impl Sequences {
    fn random() -> Self {
        let [batch, len, d, n, k] = SIZES;
        let mut numbers = Numbers::new(9);
        Sequences {
            xz: numbers.ordinary(batch * len * 2 * d),
            dt: numbers.ordinary(batch * len * d),
            bc: numbers.ordinary(batch * len * 2 * n),
            weights: [
                vec![
                    ("weight", numbers.ordinary(d * k)),
                    ("bias", numbers.ordinary(d)),
                ],
                vec![
                    ("a_log", numbers.ordinary(d * n)),
                    ("skip", numbers.ordinary(d)),
                    ("dt_bias", numbers.ordinary(d)),
                ],
            ],
        }
    }

    /// The output over some positions from these states, and the states after them.
    fn window(&self, positions: Range<usize>, states: &States, keep: u32) -> (Values, States) {
        let [batch, len, d, n, k] = SIZES;
        let part = |values: &Values, columns| rows_of(values, (len, columns), positions.clone());
        let (seq_len, math, carried) = (positions.len(), Math::F32, true);
        let case = |op: Op, weights: &[(&'static str, Values)], state: &Values| {
            let keep = Values::U32(vec![keep; batch]);
            let case = Case::random(op, 1).with("xz", part(&self.xz, 2 * d));
            let case = case.with("state", state.clone()).with("keep", keep);
            weights
                .iter()
                .cloned()
                .fold(case, |case, (name, values)| case.with(name, values))
        };
        let conv = Conv1d {
            shape: conv_shape([batch, seq_len, d, k]),
            carried,
            math,
        };
        let [u, conv_state]: [Values; 2] = run(&case(conv.into(), &self.weights[0], &states.0))
            .try_into()
            .expect("two outputs");
        let scan = Scan {
            shape: scan_shape([batch, seq_len, d, n, 3]),
            carried,
            math,
        };
        let case = case(scan.into(), &self.weights[1], &states.1)
            .with("u", u)
            .with("dt", part(&self.dt, d))
            .with("bc", part(&self.bc, 2 * n));
        let [out, _, scan_state]: [Values; 3] = run(&case).try_into().expect("three outputs");
        (out, (conv_state, scan_state))
    }
}

/// Of the convolution and of the scan.
type States = (Values, Values);

/// A sequence in one piece and in windows of 1, 4 and 6 positions gives the same bits, also the states at
/// its end; a sequence whose flag is 0 begins anew.
#[test]
fn windows_that_go_on_give_the_bits_of_the_whole_sequence() {
    let [batch, len, d, n, k] = SIZES;
    let sequences = Sequences::random();
    let other = (
        Values::F32(vec![7.0; batch * d * (k - 1)]),
        Values::F32(vec![7.0; batch * d * n]),
    );
    let (whole, end) = sequences.window(0..len, &other, 0);
    let mut states = other;
    for positions in [0..1, 1..5, 5..11] {
        let keep = u32::from(positions.start > 0);
        let (out, next) = sequences.window(positions.clone(), &states, keep);
        let expected = rows_of(&whole, (len, d), positions.clone());
        assert_eq!(out.bytes(), expected.bytes(), "{positions:?}");
        let (anew, _) = sequences.window(positions.clone(), &states, 0);
        assert_eq!(anew.bytes() == expected.bytes(), keep == 0, "{positions:?}");
        states = next;
    }
    assert_eq!(states.0.bytes(), end.0.bytes());
    assert_eq!(states.1.bytes(), end.1.bytes());
}
