//! The backward ops of Mamba against central differences of their forward, re-implemented in f64.

use bitstep::num::tree::TokenSum;
use bitstep::op::conv1d::{Conv1dGrad, ConvShape};
use bitstep::op::scan::{Scan, ScanGrad, ScanShape};
use bitstep::shape::Math;

use super::differences::{assert_gradient, dot, gradient_error, wide};
use super::mamba::{conv_shape, scan_shape};
use super::runner::{Case, Numbers, Values, run};

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
        restore: false,
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
