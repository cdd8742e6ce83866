//! The backward ops against central differences of their forward, re-implemented in f64.
//!
//! The loss is a fixed random combination of the forward's outputs; its coefficients are the incoming
//! gradients. What backward reads from forward, such as `rstd`, comes from the forward op itself.

use std::f64::consts::TAU;

use bitstep::num::tree::TokenSum;
use bitstep::op::Store;
use bitstep::op::bias::BiasGrad;
use bitstep::op::cross_entropy::{CrossEntropy, IGNORE, LogitsAfter};
use bitstep::op::embed::EmbedGrad;
use bitstep::op::rms_norm::{RmsNorm, RmsNormGrad};
use bitstep::op::rope::{Heads, QkNormRope, QkNormRopeGrad, RopeGrad};
use bitstep::op::swiglu::{Output, SwiGluGrad};
use bitstep::shape::Math;

use super::runner::{Case, Numbers, Values, run};

/// The largest error of a gradient, relative to its largest element.
const TOLERANCE: f64 = 2e-5;

const SUM: TokenSum = TokenSum {
    tokens: 9,
    grain: 6,
    piece: 4,
};

/// An f32 operand as f64.
pub fn wide(values: &Values) -> Vec<f64> {
    values.f32s().iter().map(|&x| f64::from(x)).collect()
}

/// `Σ a · b`.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The error of `found` as the gradient of `loss` at `point`, relative to its largest element.
pub fn gradient_error(point: &[f64], found: &Values, loss: impl Fn(&[f64]) -> f64) -> f64 {
    let mut at = point.to_vec();
    let (mut error, mut largest) = (0.0_f64, 0.0_f64);
    assert_eq!(found.len(), point.len());
    for (i, found) in wide(found).into_iter().enumerate() {
        let step = 1e-4 * point[i].abs().max(1e-2);
        at[i] = point[i] + step;
        let above = loss(&at);
        at[i] = point[i] - step;
        let slope = (above - loss(&at)) / (2.0 * step);
        at[i] = point[i];
        error = error.max((slope - found).abs());
        largest = largest.max(slope.abs());
    }
    assert!(
        largest > 0.0,
        "a loss that does not depend on the input tests nothing"
    );
    // A NaN must not pass: `max` would drop it.
    match wide(found).iter().all(|x| x.is_finite()) {
        true => error / largest,
        false => f64::NAN,
    }
}

/// Whether `found` is the gradient of `loss` at `point`.
pub fn assert_gradient(point: &[f64], found: &Values, loss: impl Fn(&[f64]) -> f64) {
    let error = gradient_error(point, found, loss);
    assert!(error < TOLERANCE, "relative error {error:e}");
}

fn norm(r: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let d = weight.len();
    let row = |r: &[f64]| {
        let rstd = 1.0 / (dot(r, r) / d as f64 + eps).sqrt();
        (0..d).map(|i| r[i] * rstd * weight[i]).collect::<Vec<_>>()
    };
    r.chunks(d).flat_map(row).collect()
}

/// Gradients of the fused residual norm for inputs of `size`: `[dr, dweight]`, and the operands.
fn residual_norm(size: f32, forward_eps: f32) -> ([Values; 2], [Vec<f64>; 4]) {
    let d = 37;
    let mut numbers = Numbers::new(7);
    let mut scaled = |size: f32| {
        let values = numbers.ordinary(SUM.tokens * d);
        Values::F32(values.f32s().iter().map(|x| x * size).collect())
    };
    let (x, delta, dh, direct) = (scaled(size), scaled(size), scaled(1.0), scaled(1.0));
    let weight = numbers.ordinary(d);
    let op = RmsNorm {
        math: Math::F32,
        rows: SUM.tokens,
        d_model: d,
        eps: forward_eps,
        residual: true,
    };
    let forward = Case::random(op, 0)
        .with("x", x)
        .with("delta", delta)
        .with("weight", weight.clone());
    let [r, _, rstd]: [Values; 3] = run(&forward).try_into().expect("three outputs");
    let op = RmsNormGrad {
        delta_grad: false,
        math: Math::F32,
        d_model: d,
        sum: SUM,
        store: Store::Add,
        weight_grad: true,
    };
    let points = [wide(&r), wide(&weight), wide(&dh), wide(&direct)];
    let back = Case::random(op, 0)
        .with("dh", dh)
        .with("r", r)
        .with("weight", weight)
        .with("rstd", rstd)
        .with("dr", direct);
    (run(&back).try_into().expect("two outputs"), points)
}

/// The residual stream has a gradient of its own beside the one through the norm (pitfall 24). At an
/// input as small as the root of eps, a backward with another eps would be far off (pitfall 19).
#[test]
fn rms_norm_with_residual() {
    for size in [1.0, 1e-3] {
        let ([dr, dweight], [r, weight, dh, direct]) = residual_norm(size, 1e-6);
        let loss = |r: &[f64], weight: &[f64]| dot(&dh, &norm(r, weight, 1e-6)) + dot(&direct, r);
        // The step of a difference is relative to at least 1e-2, so small inputs are scaled up.
        let scale = f64::from(size);
        let point: Vec<f64> = r.iter().map(|x| x / scale).collect();
        let scaled_dr = dr.f32s().iter().map(|x| x * size).collect();
        assert_gradient(&point, &Values::F32(scaled_dr), |point| {
            let r: Vec<f64> = point.iter().map(|x| x * scale).collect();
            loss(&r, &weight)
        });
        assert_gradient(&weight, &dweight, |weight| loss(&r, weight));
    }
}

#[test]
fn another_eps_in_forward_is_noticed() {
    let ([dr, _], [r, weight, dh, direct]) = residual_norm(1.0, 1e-2);
    let error = gradient_error(&r, &dr, |r| {
        dot(&dh, &norm(r, &weight, 1e-6)) + dot(&direct, r)
    });
    assert!(error > 10.0 * TOLERANCE, "relative error {error:e}");
}

#[test]
fn embedding() {
    let (vocab_size, d_model) = (5, 7);
    let mut numbers = Numbers::new(11);
    let ids = numbers.ids(SUM.tokens, vocab_size);
    let dx = numbers.ordinary(SUM.tokens * d_model);
    let table = wide(&numbers.ordinary(vocab_size * d_model));
    let op = EmbedGrad {
        vocab_size,
        d_model,
        sum: SUM,
        store: Store::Assign,
    };
    let case = Case::random(op, 0)
        .with("ids", ids.clone())
        .with("dx", dx.clone());
    let dx = wide(&dx);
    assert_gradient(&table, &run(&case)[0], |table| {
        let rows = ids.i32s().iter().zip(dx.chunks(d_model));
        rows.map(|(&id, dx)| dot(dx, &table[id as usize * d_model..]))
            .sum()
    });
}

#[test]
fn bias() {
    let n_out = 6;
    let mut numbers = Numbers::new(12);
    let dy = numbers.ordinary(SUM.tokens * n_out);
    let point = wide(&numbers.ordinary(n_out));
    let case = Case::random(
        BiasGrad {
            math: Math::F32,
            n_out,
            sum: SUM,
        },
        0,
    )
    .with("dy", dy.clone());
    let dy = wide(&dy);
    assert_gradient(&point, &run(&case)[0], |bias| {
        dy.chunks(n_out).map(|dy| dot(dy, bias)).sum()
    });
}

fn swiglu(gate_up: &[f64], d_ff: usize) -> Vec<f64> {
    let row = |row: &[f64]| {
        let (gate, up) = row.split_at(d_ff);
        let silu = |g: f64| g / (1.0 + (-g).exp());
        let pairs = gate.iter().zip(up);
        pairs.map(|(&g, &u)| silu(g) * u).collect::<Vec<_>>()
    };
    gate_up.chunks(2 * d_ff).flat_map(row).collect()
}

#[test]
fn swiglu_gate_and_up() {
    let (rows, d_ff) = (4, 9);
    let mut numbers = Numbers::new(13);
    let da = numbers.ordinary(rows * d_ff);
    let gate_up = (0..rows * 2 * d_ff).map(|_| numbers.uniform(-4.0, 4.0) as f32);
    let gate_up = Values::F32(gate_up.collect());
    let case = Case::random(
        SwiGluGrad {
            math: Math::F32,
            rows,
            d_ff,
            output: Output::Left,
        },
        0,
    )
    .with("da", da.clone())
    .with("gate_up", gate_up.clone());
    let da = wide(&da);
    assert_gradient(&wide(&gate_up), &run(&case)[0], |gate_up| {
        dot(&da, &swiglu(gate_up, d_ff))
    });
}

const HEADS: Heads = Heads {
    n_heads: 3,
    n_kv_heads: 1,
    head_dim: 10,
};
const SEQ_LEN: usize = 3;

/// Cosines and sines of random angles.
fn angles(numbers: &mut Numbers) -> Values {
    let pair = |angle: f64| [angle.cos() as f32, angle.sin() as f32];
    let n = SEQ_LEN * HEADS.head_dim / 2;
    let pairs = (0..n).flat_map(|_| pair(numbers.uniform(0.0, TAU)));
    Values::F32(pairs.collect())
}

/// The rotation of transformers: `x · cos + rotate_half(x) · sin`.
fn rotate(qkv: &[f64], table: &[f64]) -> Vec<f64> {
    let (d, half) = (HEADS.head_dim, HEADS.head_dim / 2);
    let mut out = qkv.to_vec();
    for (row, qkv) in out.chunks_mut(HEADS.columns()).enumerate() {
        let table = &table[row % SEQ_LEN * d..][..d];
        for head in qkv.chunks_mut(d).take(HEADS.rotated()) {
            let rotated: Vec<f64> = (0..d)
                .map(|i| {
                    let (cos, sin) = (table[i % half * 2], table[i % half * 2 + 1]);
                    let other = if i < half {
                        -head[i + half]
                    } else {
                        head[i - half]
                    };
                    head[i] * cos + other * sin
                })
                .collect();
            head.copy_from_slice(&rotated);
        }
    }
    out
}

#[test]
fn rope() {
    let mut numbers = Numbers::new(14);
    let table = angles(&mut numbers);
    let n = SUM.tokens * HEADS.columns();
    let (dqkv, point) = (numbers.ordinary(n), wide(&numbers.ordinary(n)));
    let op = RopeGrad {
        math: Math::F32,
        rows: SUM.tokens,
        seq_len: SEQ_LEN,
        heads: HEADS,
    };
    let case = Case::random(op, 0)
        .with("table", table.clone())
        .with("dqkv", dqkv.clone());
    let (table, cotangent) = (wide(&table), wide(&dqkv));
    assert_gradient(&point, &run(&case)[0], |qkv| {
        dot(&cotangent, &rotate(qkv, &table))
    });
}

/// The norm of every head, then the rotation.
fn norm_rotate(qkv: &[f64], [query, key]: [&[f64]; 2], table: &[f64]) -> Vec<f64> {
    let mut normed = qkv.to_vec();
    for row in normed.chunks_mut(HEADS.columns()) {
        let heads = row.chunks_mut(HEADS.head_dim).take(HEADS.rotated());
        for (head, x) in heads.enumerate() {
            let weight = if head < HEADS.n_heads { query } else { key };
            let y = norm(x, weight, 1e-6);
            x.copy_from_slice(&y);
        }
    }
    rotate(&normed, table)
}

#[test]
fn qk_norm_rope() {
    let mut numbers = Numbers::new(15);
    let table = angles(&mut numbers);
    let n = SUM.tokens * HEADS.columns();
    let (qkv, dqkv) = (numbers.ordinary(n), numbers.ordinary(n));
    let weights = [
        numbers.ordinary(HEADS.head_dim),
        numbers.ordinary(HEADS.head_dim),
    ];
    let with_inputs = |case: Case| {
        case.with("qkv", qkv.clone())
            .with("q_weight", weights[0].clone())
            .with("k_weight", weights[1].clone())
            .with("table", table.clone())
    };
    let op = QkNormRope {
        math: Math::F32,
        rows: SUM.tokens,
        seq_len: SEQ_LEN,
        heads: HEADS,
        eps: 1e-6,
    };
    let rstd = run(&with_inputs(Case::random(op, 0))).remove(1);
    let op = QkNormRopeGrad {
        math: Math::F32,
        seq_len: SEQ_LEN,
        heads: HEADS,
        sum: SUM,
        weight_grad: true,
    };
    let case = with_inputs(Case::random(op, 0))
        .with("rstd", rstd)
        .with("dqkv", dqkv.clone());
    let found = run(&case);
    let (x, table, dqkv) = (wide(&qkv), wide(&table), wide(&dqkv));
    let [q, k] = weights.map(|w| wide(&w));
    let loss = |x: &[f64], q: &[f64], k: &[f64]| dot(&dqkv, &norm_rotate(x, [q, k], &table));
    assert_gradient(&x, &found[0], |x| loss(x, &q, &k));
    assert_gradient(&q, &found[1], |q| loss(&x, q, &k));
    assert_gradient(&k, &found[2], |k| loss(&x, &q, k));
}

/// Weights of both signs, an ignored row and a normaliser of the caller's own.
#[test]
fn cross_entropy() {
    let (rows, vocab_size) = (5, 11);
    let mut numbers = Numbers::new(16);
    let logits = numbers.ordinary(rows * vocab_size);
    let weights = numbers.ordinary(rows);
    let targets = vec![0, 10, IGNORE, 3, 3];
    let inv_normaliser = 0.3_f32;
    let op = CrossEntropy {
        math: Math::F32,
        rows,
        vocab_size,
        after: LogitsAfter::Gradient,
    };
    let case = Case::random(op, 0)
        .with("targets", Values::I32(targets.clone()))
        .with("weights", weights.clone())
        .with("scalars", Values::F32(vec![inv_normaliser; 8]))
        .with("logits", logits.clone());
    let weights = wide(&weights);
    assert_gradient(&wide(&logits), &run(&case)[2], |logits| {
        let mut loss = 0.0;
        for (row, x) in logits.chunks(vocab_size).enumerate() {
            if targets[row] != IGNORE {
                let lse = x.iter().map(|x| x.exp()).sum::<f64>().ln();
                loss += (lse - x[targets[row] as usize]) * weights[row];
            }
        }
        loss * f64::from(inv_normaliser)
    });
}
