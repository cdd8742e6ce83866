//! The ops of Mamba: bits against the formulas, gradients against differences, and windows that go on.

use bitstep::error::DeviceError;
use bitstep::num::tree::TokenSum;
use bitstep::op::Op;
use bitstep::op::carry_state::CarryState;
use bitstep::op::conv1d::{Conv1d, Conv1dGrad, ConvShape};
use bitstep::op::scan::{Scan, ScanGrad, ScanShape};
use bitstep::op::split_columns::{SplitColumns, SplitColumnsGrad};
use bitstep::shape::Math;

use super::differences::{assert_gradient, dot, gradient_error, wide};
use super::reference::expected;
use super::runner::{Case, Device, Numbers, Values, assert_bits_on, devices, run, with_math};

/// The devices that have these ops: a GPU refuses them by name.
fn cpus() -> impl Iterator<Item = &'static dyn Device> {
    let cpu = |d: &&Box<dyn Device>| d.name().starts_with("CPU");
    devices().iter().filter(cpu).map(|d| d.as_ref())
}

fn check(case: &Case) {
    assert_bits_on(cpus(), case, &expected(case));
    for math in [Math::Bf16, Math::F16] {
        if with_math(&case.op, math) != case.op {
            let narrow = case.in_math(math);
            assert_bits_on(cpus(), &narrow, &expected(&narrow));
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

fn conv_shape([batch, seq_len, d_inner, d_conv]: [usize; 4]) -> ConvShape {
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
const SCANS: [[usize; 5]; 6] = [
    [1, 1, 1, 1, 64],
    [2, 5, 3, 8, 2],
    [3, 8, 33, 16, 4],
    [1, 70, 5, 64, 64],
    [2, 9, 130, 7, 9],
    [4, 3, 32, 12, 1],
];

fn scan_shape([batch, seq_len, d_inner, d_state, chunk]: [usize; 5]) -> ScanShape {
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
        for (weight_grad, state_grad, sequences) in
            [(true, false, 1), (true, true, 2), (false, true, 4)]
        {
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
                math: Math::F32,
            };
            check(&scan_case(op, &shape, seed as u64));
        }
    }
}

#[test]
fn an_operand_of_another_size_is_named() {
    let conv = conv_shape([2, 6, 5, 4]);
    let scan = scan_shape([2, 6, 5, 8, 4]);
    let (math, carried, weight_grad) = (Math::F32, true, true);
    let sum = TokenSum {
        tokens: 12,
        grain: 12,
        piece: 6,
    };
    let ops: Vec<Op> = vec![
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
    ];
    for op in ops {
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
        math: Math::F32,
    };
    let refused = DeviceError::OperandSize {
        operand: "pieces",
        expected: 2,
        found: 3,
    };
    assert_eq!(devices()[0].run(&Case::random(op, 5)).err(), Some(refused));
}

/// The rows `positions` of every sequence of `[batch · seq_len, columns]`.
fn rows_of(
    values: &Values,
    seq_len: usize,
    columns: usize,
    positions: std::ops::Range<usize>,
) -> Values {
    let sequences = values.f32s().chunks(seq_len * columns);
    let part = |s: &[f32]| s[positions.start * columns..positions.end * columns].to_vec();
    Values::F32(sequences.flat_map(part).collect())
}

/// A sequence in one piece and in windows of 1, 4 and 6 positions gives the same bits, also the states at
/// its end; a sequence whose flag is 0 begins anew.
#[test]
fn windows_that_go_on_give_the_bits_of_the_whole_sequence() {
    let (batch, len, d, n, k) = (2, 11, 37, 9, 4);
    let mut numbers = Numbers::new(9);
    let xz = numbers.ordinary(batch * len * 2 * d);
    let (dt, bc) = (
        numbers.ordinary(batch * len * d),
        numbers.ordinary(batch * len * 2 * n),
    );
    let weights: Vec<(&str, Values)> = vec![
        ("weight", numbers.ordinary(d * k)),
        ("bias", numbers.ordinary(d)),
        ("a_log", numbers.ordinary(d * n)),
        ("skip", numbers.ordinary(d)),
        ("dt_bias", numbers.ordinary(d)),
    ];
    let weight = |name: &str| {
        weights
            .iter()
            .find(|w| w.0 == name)
            .expect("there")
            .1
            .clone()
    };
    let empty = (
        Values::F32(vec![7.0; batch * d * (k - 1)]),
        Values::F32(vec![7.0; batch * d * n]),
    );
    // The outputs of both ops over some positions, from states: `[u, conv state, out, scan state]`.
    let window = |positions: std::ops::Range<usize>, states: &(Values, Values), keep: u32| {
        let part = |values: &Values, columns| rows_of(values, len, columns, positions.clone());
        let (seq_len, math, carried) = (positions.len(), Math::F32, true);
        let keep = Values::U32(vec![keep; batch]);
        let op = Conv1d {
            shape: conv_shape([batch, seq_len, d, k]),
            carried,
            math,
        };
        let case = Case::random(op, 1)
            .with("xz", part(&xz, 2 * d))
            .with("weight", weight("weight"))
            .with("bias", weight("bias"))
            .with("state", states.0.clone())
            .with("keep", keep.clone());
        let [u, conv_state]: [Values; 2] = run(&case).try_into().expect("two outputs");
        let op = Scan {
            shape: scan_shape([batch, seq_len, d, n, 3]),
            carried,
            math,
        };
        let case = Case::random(op, 1)
            .with("u", u)
            .with("dt", part(&dt, d))
            .with("bc", part(&bc, 2 * n))
            .with("xz", part(&xz, 2 * d))
            .with("a_log", weight("a_log"))
            .with("skip", weight("skip"))
            .with("dt_bias", weight("dt_bias"))
            .with("state", states.1.clone())
            .with("keep", keep);
        let [out, _, scan_state]: [Values; 3] = run(&case).try_into().expect("three outputs");
        (out, (conv_state, scan_state))
    };
    let (whole, end) = window(0..len, &empty, 0);
    let mut states = empty.clone();
    for positions in [0..1, 1..5, 5..11] {
        let keep = u32::from(positions.start > 0);
        let (out, next) = window(positions.clone(), &states, keep);
        let expected = rows_of(&whole, len, d, positions.clone());
        assert_eq!(out.bytes(), expected.bytes(), "{positions:?}");
        let (anew, _) = window(positions.clone(), &states, 0);
        assert_eq!(anew.bytes() == expected.bytes(), keep == 0, "{positions:?}");
        states = next;
    }
    assert_eq!(states.0.bytes(), end.0.bytes());
    assert_eq!(states.1.bytes(), end.1.bytes());
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// The convolution in f64: `xz`, weight, bias and the inputs before the sequences.
fn conv_f64(shape: &ConvShape, [xz, weight, bias, state]: [&[f64]; 4]) -> Vec<f64> {
    let (d, k, len) = (shape.d_inner, shape.d_conv, shape.seq_len);
    let mut out = Vec::new();
    for row in 0..shape.rows() {
        let (b, t) = (row / len, row % len);
        for c in 0..d {
            let tap = |j: usize| match (t + j).checked_sub(k - 1) {
                Some(at) => xz[(b * len + at) * 2 * d + c],
                None => state[(b * d + c) * (k - 1) + t + j],
            };
            let v: f64 = (0..k).map(|j| weight[c * k + j] * tap(j)).sum();
            out.push(silu(v + bias[c]));
        }
    }
    out
}

#[test]
fn conv_gradients_are_its_slopes() {
    let shape = conv_shape([3, 5, 4, 4]);
    let (d, rows) = (shape.d_inner, shape.rows());
    let mut numbers = Numbers::new(21);
    let op = Conv1dGrad {
        shape,
        sum: TokenSum {
            tokens: rows,
            grain: 10,
            piece: 4,
        },
        parts: 2,
        weight_grad: true,
        carried: true,
        math: Math::F32,
    };
    let [du, du_more] = [0, 0].map(|_| numbers.ordinary(rows * d));
    let (xz, weight) = (
        numbers.ordinary(rows * 2 * d),
        numbers.ordinary(d * shape.d_conv),
    );
    let bias = numbers.ordinary(d);
    let state = numbers.ordinary(shape.state().iter().product());
    let case = Case::random(op, 1)
        .with("du", du.clone())
        .with("du_more", du_more.clone())
        .with("xz", xz.clone())
        .with("weight", weight.clone())
        .with("bias", bias.clone())
        .with("state", state.clone())
        .with("keep", Values::U32(vec![1; 3]))
        .with("dxz", Values::F32(vec![0.0; rows * 2 * d]));
    let found = run(&case);
    let parts = wide(&du).into_iter().zip(wide(&du_more));
    let du: Vec<f64> = parts.map(|(a, b)| a + b).collect();
    let (xz, weight, bias, state) = (wide(&xz), wide(&weight), wide(&bias), wide(&state));
    let loss = |inputs: [&[f64]; 4]| dot(&du, &conv_f64(&shape, inputs));
    assert_gradient(&xz, &found[0], |xz| loss([xz, &weight, &bias, &state]));
    assert_gradient(&weight, &found[1], |w| loss([&xz, w, &bias, &state]));
    assert_gradient(&bias, &found[2], |bias| loss([&xz, &weight, bias, &state]));
}

/// The scan in f64: `u`, `dt`, `bc`, `xz`, `a_log`, skip, the bias of the time steps, and the first states.
fn scan_f64(shape: &ScanShape, inputs: [&[f64]; 8]) -> Vec<f64> {
    let [u, dt, bc, xz, a_log, skip, bias, state] = inputs;
    let (d, n, len) = (shape.d_inner, shape.d_state, shape.seq_len);
    let mut out = vec![0.0; shape.rows() * d];
    for b in 0..shape.batch {
        for c in 0..d {
            let mut h = state[(b * d + c) * n..][..n].to_vec();
            for row in b * len..(b + 1) * len {
                let at = row * d + c;
                let delta = (dt[at] + bias[c]).exp().ln_1p();
                let mut y = skip[c] * u[at];
                for (i, h) in h.iter_mut().enumerate() {
                    let a = -a_log[c * n + i].exp();
                    *h = (delta * a).exp() * *h + delta * u[at] * bc[row * 2 * n + i];
                    y += bc[(row * 2 + 1) * n + i] * *h;
                }
                out[at] = y * silu(xz[(row * 2 + 1) * d + c]);
            }
        }
    }
    out
}

/// A random point of the scan, the gradients found there, and the incoming gradient.
fn scan_point(changed: impl Fn(Case) -> Case) -> (ScanShape, Vec<Vec<f64>>, Vec<Values>, Vec<f64>) {
    let shape = scan_shape([3, 7, 4, 8, 3]);
    let (d, n, rows, math) = (shape.d_inner, shape.d_state, shape.rows(), Math::F32);
    let mut numbers = Numbers::new(31);
    let sizes = [
        rows * d,
        rows * d,
        rows * 2 * n,
        rows * 2 * d,
        d * n,
        d,
        d,
        3 * d * n,
    ];
    let names = ["u", "dt", "bc", "xz", "a_log", "skip", "dt_bias", "state"];
    let values = sizes.map(|size| numbers.ordinary(size));
    let dout = numbers.ordinary(rows * d);
    let with = |mut case: Case, count: usize| {
        for (name, values) in names.iter().zip(&values).take(count) {
            case = case.with(name, values.clone());
        }
        case
    };
    let op = Scan {
        shape,
        carried: true,
        math,
    };
    let keep = Values::U32(vec![1; 3]);
    let starts = run(&with(Case::random(op, 1), 8).with("keep", keep)).remove(1);
    let op = ScanGrad {
        shape,
        sum: TokenSum {
            tokens: rows,
            grain: 14,
            piece: 7,
        },
        weight_grad: true,
        state_grad: true,
        math,
    };
    let case = with(Case::random(op, 1), 7)
        .with("dout", dout.clone())
        .with("starts", starts)
        .with("dxz", Values::F32(vec![0.0; rows * 2 * d]));
    let found = run(&changed(case));
    (shape, values.iter().map(wide).collect(), found, wide(&dout))
}

#[test]
fn scan_gradients_are_its_slopes() {
    let (shape, point, found, dout) = scan_point(|case| case);
    for (which, found) in found.iter().enumerate() {
        assert_gradient(&point[which], found, |moved| {
            let mut inputs: Vec<&[f64]> = point.iter().map(Vec::as_slice).collect();
            inputs[which] = moved;
            dot(
                &dout,
                &scan_f64(&shape, inputs.try_into().expect("eight inputs")),
            )
        });
    }
    assert_eq!(found.len(), 8);
}

#[test]
fn a_backward_from_other_chunk_starts_is_noticed() {
    let (shape, point, found, dout) = scan_point(|case| {
        let starts = case.reads[8].f32s().iter().map(|x| x + 0.1).collect();
        case.with("starts", Values::F32(starts))
    });
    let error = gradient_error(&point[4], &found[4], |a_log| {
        let mut inputs: Vec<&[f64]> = point.iter().map(Vec::as_slice).collect();
        inputs[4] = a_log;
        dot(
            &dout,
            &scan_f64(&shape, inputs.try_into().expect("eight inputs")),
        )
    });
    assert!(error > 1e-3, "relative error {error:e}");
}
