//! The formulas of the ops, re-implemented plainly from their docs: one element at a time, with its
//! own lanes, chains and trees. Only the elementary functions are the crate's.

use std::ops::Range;

use bitstep::num::tree::TokenSum;
use bitstep::num::{exp, log, narrow_sigmoid, sigmoid};
use bitstep::op::adamw::AdamW;
use bitstep::op::bias::BiasGrad;
use bitstep::op::clip::GradSquares;
use bitstep::op::cross_entropy::{CrossEntropy, IGNORE, LogitsAfter};
use bitstep::op::embed::{Embed, EmbedGrad};
use bitstep::op::rms_norm::{RmsNorm, RmsNormGrad};
use bitstep::op::rope::{Heads, QkNormRope, QkNormRopeGrad};
use bitstep::op::swiglu::{Output, SwiGluGrad};
use bitstep::op::{Op, Store};
use bitstep::shape::{DType, Math};

use super::narrow_loss::{self, Scored};
use super::reference_mamba;
use super::runner::{Case, Values};

/// The 256-lane reduction; `step(i, acc)` is the next value of the lane of element `i`.
pub fn lanes(n: usize, step: impl Fn(usize, f32) -> f32) -> f32 {
    let mut lanes = [0.0_f32; 256];
    for i in 0..n {
        lanes[i % 256] = step(i, lanes[i % 256]);
    }
    for half in [128, 64, 32, 16, 8, 4, 2, 1] {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
    }
    lanes[0]
}

/// The balanced tree: split at the largest power of two below the number of leaves.
pub fn tree<T: Copy + std::ops::Add<Output = T> + Default>(leaves: &[T]) -> T {
    match leaves.len() {
        0 => T::default(),
        1 => leaves[0],
        n => {
            let (left, right) = leaves.split_at(n.next_power_of_two() / 2);
            tree(left) + tree(right)
        }
    }
}

/// Chains over pieces, a tree over the pieces of each grain, a tree over the grains.
pub fn token_sum(sum: &TokenSum, chain: impl Fn(Range<usize>) -> f32) -> f32 {
    let mut grains = Vec::new();
    let mut at = 0;
    while at < sum.tokens {
        let end = (at + sum.grain).min(sum.tokens);
        let mut pieces = Vec::new();
        while at < end {
            let stop = (at + sum.piece).min(end);
            pieces.push(chain(at..stop));
            at = stop;
        }
        grains.push(tree(&pieces));
    }
    tree(&grains)
}

/// What the written operands hold after the case.
///
/// Every op computes in f32 from what its operands store and rounds once to what it stores.
pub fn expected(case: &Case) -> Vec<Values> {
    let signature = case.op.rule().signature();
    let outputs = signature.writes.iter().zip(wide(&case.widened()));
    outputs
        .map(|(operand, values)| match values {
            Values::F32(numbers) => Values::stored(operand.dtype, &numbers),
            other => other,
        })
        .collect()
}

/// The formulas, all floats being f32.
fn wide(case: &Case) -> Vec<Values> {
    let reads: Vec<&[f32]> = case
        .reads
        .iter()
        .map(|v| match v {
            Values::F32(v) => v.as_slice(),
            _ => &[],
        })
        .collect();
    let written = |i: usize| case.writes[i].f32s();
    let outputs = match &case.op {
        Op::Embed(op) => embed(op, case.reads[0].i32s(), reads[1]),
        Op::EmbedGrad(op) => embed_grad(op, case.reads[0].i32s(), reads[1], written(0)),
        Op::RmsNorm(op) => rms_norm(op, &reads),
        Op::RmsNormGrad(op) => rms_norm_grad(op, &reads, written(0)),
        Op::BiasGrad(op) => bias_grad(op, reads[0]),
        Op::Rope(op) => vec![turn(&op.heads, op.seq_len, reads[0], written(0), 1.0)],
        Op::RopeGrad(op) => vec![turn(&op.heads, op.seq_len, reads[0], written(0), -1.0)],
        Op::QkNormRope(op) => qk_norm_rope(op, &reads),
        Op::QkNormRopeGrad(op) => qk_norm_rope_grad(op, &reads, written(0)),
        Op::SwiGlu(op) => vec![swiglu(op.math, op.d_ff, reads[0])],
        Op::SwiGluGrad(op) => swiglu_grad(op, case),
        Op::CrossEntropy(op) => return cross_entropy(op, case),
        Op::LossSum(op) => {
            let sum = token_sum(&op.sum, |piece| piece.fold(0.0, |acc, t| acc + reads[0][t]));
            vec![vec![sum * reads[1][6]]]
        }
        Op::TreeAdd(_) => {
            let pairs = written(0).iter().zip(reads[0]);
            vec![pairs.map(|(l, r)| l + r).collect()]
        }
        Op::Copy(_) => vec![reads[0].to_vec()],
        Op::FillNeutral(op) => vec![vec![-0.0; op.elements]],
        Op::GradSquares(op) => return grad_squares(op, reads[0]),
        Op::Clip(_) => return clip(case),
        Op::AdamW(op) => adamw(op, case),
        Op::Conv1d(op) => reference_mamba::conv(op, case),
        Op::Conv1dGrad(op) => reference_mamba::conv_grad(op, case),
        Op::SplitColumns(op) => {
            let rows = reads[0].chunks(op.n_left + op.n_right);
            let parts = |range: Range<usize>| rows.clone().flat_map(move |r| &r[range.clone()]);
            let (left, all) = (op.n_left, op.n_left + op.n_right);
            vec![
                parts(0..left).copied().collect(),
                parts(left..all).copied().collect(),
            ]
        }
        Op::SplitColumnsGrad(op) => {
            let rows = reads[0].chunks(op.n_left).zip(reads[1].chunks(op.n_right));
            vec![
                rows.flat_map(|(left, right)| [left, right].concat())
                    .collect(),
            ]
        }
        Op::Scan(op) => reference_mamba::scan(op, case),
        Op::ScanGrad(op) => reference_mamba::scan_grad(op, case),
        Op::CarryState(_) => {
            let Values::U32(report) = &case.reads[1] else {
                panic!("the report is u32")
            };
            vec![if report[3] != 0 { reads[0] } else { written(0) }.to_vec()]
        }
        other => panic!("no reference for {other}"),
    };
    outputs.into_iter().map(Values::F32).collect()
}

fn embed(op: &Embed, ids: &[i32], table: &[f32]) -> Vec<Vec<f32>> {
    let d = op.d_model;
    let rows = ids.iter().map(|&id| &table[id as usize * d..][..d]);
    vec![rows.flatten().copied().collect()]
}

fn embed_grad(op: &EmbedGrad, ids: &[i32], dx: &[f32], before: &[f32]) -> Vec<Vec<f32>> {
    let mut out = before.to_vec();
    // Within a grain there is one chain, whatever the pieces are.
    let sum = TokenSum {
        piece: op.sum.grain,
        ..op.sum
    };
    for id in 0..op.vocab_size {
        let occurs = ids.contains(&(id as i32));
        for j in 0..op.d_model {
            let total = token_sum(&sum, |piece| {
                let positions = piece.filter(|&t| ids[t] == id as i32);
                positions.fold(0.0, |acc, t| acc + dx[t * op.d_model + j])
            });
            let place = &mut out[id * op.d_model + j];
            match op.store {
                Store::Assign => *place = total,
                Store::Add if occurs => *place += total,
                Store::Add => {}
            }
        }
    }
    vec![out]
}

fn rms_norm(op: &RmsNorm, reads: &[&[f32]]) -> Vec<Vec<f32>> {
    let d = op.d_model;
    let (x, weight) = (reads[0], reads[reads.len() - 1]);
    let r: Vec<f32> = match op.residual {
        true => x.iter().zip(reads[1]).map(|(a, b)| a + b).collect(),
        false => x.to_vec(),
    };
    let (mut h, mut rstd) = (Vec::new(), Vec::new());
    for row in 0..op.rows {
        let r = &r[row * d..][..d];
        let squares = lanes(d, |i, acc| r[i].mul_add(r[i], acc));
        let s = 1.0 / (squares / d as f32 + op.eps).sqrt();
        h.extend((0..d).map(|i| (r[i] * s) * weight[i]));
        rstd.push(s);
    }
    match op.residual {
        true => vec![r, h, rstd],
        false => vec![h, rstd],
    }
}

/// The norm's input gradient of one row.
fn norm_row_grad(dh: &[f32], r: &[f32], weight: &[f32], rstd: f32) -> Vec<f32> {
    let d = dh.len();
    let normed = |i: usize| r[i] * rstd;
    let g = |i: usize| dh[i] * weight[i];
    let c = lanes(d, |i, acc| g(i).mul_add(normed(i), acc)) / d as f32;
    let element = |i: usize| rstd * (-normed(i)).mul_add(c, g(i));
    (0..d).map(element).collect()
}

fn rms_norm_grad(op: &RmsNormGrad, reads: &[&[f32]], before: &[f32]) -> Vec<Vec<f32>> {
    let (d, tokens) = (op.d_model, op.sum.tokens);
    let [dh, r, weight, rstd] = reads else {
        panic!("four operands")
    };
    let mut dr = Vec::new();
    for t in 0..tokens {
        let row = t * d..(t + 1) * d;
        dr.extend(norm_row_grad(&dh[row.clone()], &r[row], weight, rstd[t]));
    }
    if op.store == Store::Add {
        dr = before.iter().zip(&dr).map(|(old, new)| old + new).collect();
    }
    let dweight = |j: usize| {
        token_sum(&op.sum, |piece| {
            piece.fold(0.0, |acc, t| {
                let i = t * d + j;
                dh[i].mul_add(r[i] * rstd[t], acc)
            })
        })
    };
    let ddelta = op.delta_grad.then(|| dr.clone());
    let dweight = op.weight_grad.then(|| (0..d).map(dweight).collect());
    [Some(dr), ddelta, dweight].into_iter().flatten().collect()
}

fn bias_grad(op: &BiasGrad, dy: &[f32]) -> Vec<Vec<f32>> {
    let column = |o: usize| {
        token_sum(&op.sum, |piece| {
            piece.fold(0.0, |acc, t| acc + dy[t * op.n_out + o])
        })
    };
    vec![(0..op.n_out).map(column).collect()]
}

/// The rotation of every query and key head, or with `sign` -1 its inverse.
fn turn(heads: &Heads, seq_len: usize, table: &[f32], qkv: &[f32], sign: f32) -> Vec<f32> {
    let half = heads.head_dim / 2;
    let mut out = qkv.to_vec();
    for (row, qkv) in out.chunks_mut(heads.columns()).enumerate() {
        for head in 0..heads.n_heads + heads.n_kv_heads {
            for i in 0..half {
                let pair = ((row % seq_len) * half + i) * 2;
                let (cos, sin) = (table[pair], table[pair + 1]);
                let at = head * heads.head_dim + i;
                let (a, b) = (qkv[at], qkv[at + half]);
                qkv[at] = a.mul_add(cos, -sign * (b * sin));
                qkv[at + half] = b.mul_add(cos, sign * (a * sin));
            }
        }
    }
    out
}

fn qk_norm_rope(op: &QkNormRope, reads: &[&[f32]]) -> Vec<Vec<f32>> {
    let (heads, d) = (&op.heads, op.heads.head_dim);
    let (mut normed, mut rstd) = (reads[0].to_vec(), Vec::new());
    for row in normed.chunks_mut(heads.columns()) {
        for head in 0..heads.rotated() {
            let weight = reads[if head < heads.n_heads { 1 } else { 2 }];
            let x = &mut row[head * d..][..d];
            let squares = lanes(d, |i, acc| x[i].mul_add(x[i], acc));
            let s = 1.0 / (squares / d as f32 + op.eps).sqrt();
            for i in 0..d {
                x[i] = (x[i] * s) * weight[i];
            }
            rstd.push(s);
        }
    }
    vec![turn(heads, op.seq_len, reads[3], &normed, 1.0), rstd]
}

fn qk_norm_rope_grad(op: &QkNormRopeGrad, reads: &[&[f32]], dqkv: &[f32]) -> Vec<Vec<f32>> {
    let (heads, d) = (&op.heads, op.heads.head_dim);
    let (qkv, rstd) = (reads[0], reads[4]);
    let back = turn(heads, op.seq_len, reads[3], dqkv, -1.0);
    let mut out = back.clone();
    for t in 0..op.sum.tokens {
        for head in 0..heads.rotated() {
            let weight = reads[if head < heads.n_heads { 1 } else { 2 }];
            let at = t * heads.columns() + head * d;
            let s = rstd[t * heads.rotated() + head];
            let row = norm_row_grad(&back[at..at + d], &qkv[at..at + d], weight, s);
            out[at..at + d].copy_from_slice(&row);
        }
    }
    let weight_grad = |kind: Range<usize>| {
        let element = |j: usize| {
            token_sum(&op.sum, |piece| {
                let mut acc = 0.0;
                for t in piece {
                    for head in kind.clone() {
                        let at = t * heads.columns() + head * d + j;
                        let s = rstd[t * heads.rotated() + head];
                        acc = back[at].mul_add(qkv[at] * s, acc);
                    }
                }
                acc
            })
        };
        (0..d).map(element).collect::<Vec<f32>>()
    };
    match op.weight_grad {
        true => vec![
            out,
            weight_grad(0..heads.n_heads),
            weight_grad(heads.n_heads..heads.rotated()),
        ],
        false => vec![out],
    }
}

/// The sigmoid of SwiGLU in the storage of `math`.
fn gate_sigmoid(math: Math) -> fn(f32) -> f32 {
    match math.storage() {
        DType::F32 => sigmoid,
        _ => narrow_sigmoid,
    }
}

fn swiglu(math: Math, d_ff: usize, gate_up: &[f32]) -> Vec<f32> {
    let (mut a, sigmoid) = (Vec::new(), gate_sigmoid(math));
    for row in gate_up.chunks(2 * d_ff) {
        let element = |j: usize| (row[j] * sigmoid(row[j])) * row[d_ff + j];
        a.extend((0..d_ff).map(element));
    }
    a
}

fn swiglu_grad(op: &SwiGluGrad, case: &Case) -> Vec<Vec<f32>> {
    let written = |i: usize| case.writes[i].f32s();
    match op.output {
        Output::Left => vec![gate_up_grad(op, case.reads[0].f32s(), written(0))],
        Output::Restored => vec![
            swiglu(op.math, op.d_ff, written(1)),
            gate_up_grad(op, written(0), written(1)),
        ],
    }
}

fn gate_up_grad(op: &SwiGluGrad, da: &[f32], gate_up: &[f32]) -> Vec<f32> {
    let (mut out, sigmoid) = (gate_up.to_vec(), gate_sigmoid(op.math));
    for (row, gate_up) in out.chunks_mut(2 * op.d_ff).enumerate() {
        for j in 0..op.d_ff {
            let (g, u) = (gate_up[j], gate_up[op.d_ff + j]);
            let (s, da) = (sigmoid(g), da[row * op.d_ff + j]);
            gate_up[j] = (da * u) * (s * g.mul_add(1.0 - s, 1.0));
            gate_up[op.d_ff + j] = da * (g * s);
        }
    }
    out
}

fn cross_entropy(op: &CrossEntropy, case: &Case) -> Vec<Values> {
    let v = op.vocab_size;
    let (targets, weights) = (case.reads[0].i32s(), case.reads[1].f32s());
    let inv_normaliser = case.reads[2].f32s()[6];
    let scale = case.reads.get(3).and_then(|values| match values {
        Values::U32(state) => Some(f32::from_bits(state[0])),
        _ => None,
    });
    let mut logits = match op.after {
        LogitsAfter::Gradient => case.writes[2].f32s().to_vec(),
        LogitsAfter::Kept => case.reads[3].f32s().to_vec(),
    };
    let (mut losses, mut hits) = (Vec::new(), Vec::new());
    for (row, x) in logits.chunks_mut(v).enumerate() {
        if targets[row] == IGNORE {
            losses.push(0.0);
            hits.push(0);
            x.fill(0.0);
            continue;
        }
        let target = targets[row] as usize;
        let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        hits.push(u32::from(x[target] == max));
        if op.math.storage() != DType::F32 {
            let (math, weight) = (op.math, weights[row]);
            let (loss, gradient) = narrow_loss::row(
                x,
                Scored {
                    math,
                    target,
                    weight,
                    inv_normaliser,
                    scale: scale.unwrap_or(1.0),
                },
            );
            losses.push(loss);
            x.copy_from_slice(&gradient);
            continue;
        }
        let lse = max + log(lanes(v, |i, acc| acc + exp(x[i] - max)));
        losses.push((lse - x[target]) * weights[row]);
        for (i, x) in x.iter_mut().enumerate() {
            let p = exp(*x - lse);
            let p = if i == target { p - 1.0 } else { p };
            *x = p * (weights[row] * inv_normaliser);
            *x = scale.map_or(*x, |scale| *x * scale);
        }
    }
    let mut outputs = vec![Values::F32(losses), Values::U32(hits)];
    if op.after == LogitsAfter::Gradient {
        outputs.push(Values::F32(logits));
    }
    outputs
}

fn grad_squares(op: &GradSquares, grad: &[f32]) -> Vec<Values> {
    let mut partials = Vec::new();
    for block in grad[..op.elements].chunks(16384) {
        let mut lanes = [0.0_f64; 256];
        for (i, &x) in block.iter().enumerate() {
            lanes[i % 256] += f64::from(x) * f64::from(x);
        }
        for half in [128, 64, 32, 16, 8, 4, 2, 1] {
            for l in 0..half {
                lanes[l] += lanes[l + half];
            }
        }
        partials.push(lanes[0]);
    }
    vec![Values::F64(partials)]
}

fn clip(case: &Case) -> Vec<Values> {
    let Values::F64(partials) = &case.reads[0] else {
        panic!("partials are f64")
    };
    let (loss, scalars) = (case.reads[1].f32s()[0], case.reads[2].f32s());
    let state = case.writes.get(1).map(|values| match values {
        Values::U32(state) => (f32::from_bits(state[0]), state[1], state[2]),
        other => panic!("the loss scale is u32, found {}", other.dtype()),
    });
    let scale = state.map_or(1.0, |(scale, ..)| scale);
    let norm = tree(partials).sqrt() / f64::from(scale);
    let coefficient = f64::min(1.0, f64::from(scalars[4]) / (norm + 1e-6)) as f32;
    let bits = |x: f32| if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() };
    let dropped = u32::from(!loss.is_finite())
        + 2 * u32::from(!norm.is_finite())
        + 4 * u32::from(norm > f64::from(scalars[5]));
    let words = [
        bits(loss),
        bits(norm as f32),
        bits(coefficient),
        u32::from(dropped == 0),
        dropped,
    ];
    let Some((scale, good, skipped)) = state else {
        return vec![Values::U32([&words[..], &[0; 3]].concat())];
    };
    let next = match (dropped & 3 != 0, good + 1 == 7) {
        (true, _) => [(scale / 2.0).to_bits(), 0, skipped + 1, 0],
        (false, true) => [(scale * 2.0).to_bits(), 0, skipped, 0],
        (false, false) => [scale.to_bits(), good + 1, skipped, 0],
    };
    vec![
        Values::U32([&words[..], &[scale.to_bits(), 0, 0]].concat()),
        Values::U32(next.to_vec()),
    ]
}

fn adamw(op: &AdamW, case: &Case) -> Vec<Vec<f32>> {
    let (grad, scalars) = (case.reads[0].f32s(), case.reads[1].f32s());
    let Values::U32(report) = &case.reads[2] else {
        panic!("the report is u32")
    };
    let [mut p, mut m, mut v] = [0, 1, 2].map(|i| case.writes[i].f32s().to_vec());
    if report[3] == 0 {
        let shadow = case.writes.get(3).map(|v| v.f32s().to_vec());
        return [p, m, v].into_iter().chain(shadow).collect();
    }
    let unscale = match op.math.scales_loss() {
        true => 1.0 / f32::from_bits(report[5]),
        false => 1.0,
    };
    let (lr, c1, c2) = (scalars[0], scalars[1], scalars[2]);
    for i in 0..op.elements {
        let g = (grad[i] * unscale) * f32::from_bits(report[2]);
        m[i] = op.beta1.mul_add(m[i], op.one_minus_beta1 * g);
        v[i] = op.beta2.mul_add(v[i], (op.one_minus_beta2 * g) * g);
        let u = (m[i] * c1) / ((v[i] * c2).sqrt() + op.eps);
        let kept = if i < op.decayed {
            p[i] * scalars[3]
        } else {
            p[i]
        };
        p[i] = (-lr).mul_add(u, kept);
    }
    let shadow = case.writes.get(3).map(|_| p[op.shadowed()].to_vec());
    [p, m, v].into_iter().chain(shadow).collect()
}
