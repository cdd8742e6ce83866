//! The formulas of Mamba's ops, one element at a time, re-implemented plainly from their docs.

use bitstep::num::{decay, exp, sigmoid, softplus};
use bitstep::op::conv1d::{Conv1d, Conv1dGrad, ConvShape};
use bitstep::op::scan::{Scan, ScanGrad, ScanShape};

use super::reference::{token_sum, tree};
use super::runner::{Case, Values};

fn flags(values: &Values) -> &[u32] {
    match values {
        Values::U32(flags) => flags,
        other => panic!("expected u32, found {}", other.dtype()),
    }
}

/// The convolution before its SiLU, and what it reads.
struct Conv<'a> {
    shape: ConvShape,
    xz: &'a [f32],
    weight: &'a [f32],
    bias: &'a [f32],
    state: Option<(&'a [f32], &'a [u32])>,
}

impl<'a> Conv<'a> {
    fn of(shape: ConvShape, reads: &'a [Values]) -> Self {
        Conv {
            shape,
            xz: reads[0].f32s(),
            weight: reads[1].f32s(),
            bias: reads[2].f32s(),
            state: (reads.len() > 3).then(|| (reads[3].f32s(), flags(&reads[4]))),
        }
    }

    /// Input `back` positions before position `t` of sequence `b`.
    fn input(&self, b: usize, t: usize, back: usize, c: usize) -> f32 {
        let (d, k) = (self.shape.d_inner, self.shape.d_conv);
        if t >= back {
            return self.xz[(b * self.shape.seq_len + t - back) * 2 * d + c];
        }
        match self.state {
            Some((state, keep)) if keep[b] != 0 => {
                state[(b * d + c) * (k - 1) + (k - 1) - (back - t)]
            }
            _ => 0.0,
        }
    }

    fn v(&self, b: usize, t: usize, c: usize) -> f32 {
        let k = self.shape.d_conv;
        let taps = (0..k).fold(0.0, |acc, j| {
            self.weight[c * k + j].mul_add(self.input(b, t, k - 1 - j, c), acc)
        });
        taps + self.bias[c]
    }
}

/// `f(sequence, position, channel)` for every element of [rows, channels].
fn elements(
    (batch, seq_len, d): (usize, usize, usize),
    f: impl Fn(usize, usize, usize) -> f32,
) -> Vec<f32> {
    let mut out = Vec::new();
    for b in 0..batch {
        for t in 0..seq_len {
            out.extend((0..d).map(|c| f(b, t, c)));
        }
    }
    out
}

pub fn conv(op: &Conv1d, case: &Case) -> Vec<Vec<f32>> {
    let (shape, conv) = (op.shape, Conv::of(op.shape, &case.reads));
    let sizes = (shape.batch, shape.seq_len, shape.d_inner);
    let u = elements(sizes, |b, t, c| {
        let v = conv.v(b, t, c);
        v * sigmoid(v)
    });
    let mut outputs = vec![u];
    if op.carried {
        let (k, last) = (shape.d_conv, shape.seq_len - 1);
        let mut next = Vec::new();
        for b in 0..shape.batch {
            for c in 0..shape.d_inner {
                next.extend((0..k - 1).map(|j| conv.input(b, last, k - 2 - j, c)));
            }
        }
        outputs.push(next);
    }
    outputs
}

pub fn conv_grad(op: &Conv1dGrad, case: &Case) -> Vec<Vec<f32>> {
    let shape = op.shape;
    let (d, k, len) = (shape.d_inner, shape.d_conv, shape.seq_len);
    let conv = Conv::of(shape, &case.reads[op.parts..]);
    let dv = elements((shape.batch, len, d), |b, t, c| {
        let at = (b * len + t) * d + c;
        let parts = case.reads[..op.parts].iter().map(|part| part.f32s()[at]);
        let du = parts.reduce(|a, b| a + b).expect("a part");
        let v = conv.v(b, t, c);
        let s = sigmoid(v);
        du * (s * v.mul_add(1.0 - s, 1.0))
    });
    let mut dxz = case.writes[0].f32s().to_vec();
    for b in 0..shape.batch {
        for t in 0..len {
            for c in 0..d {
                let ahead = |j: usize| match t + k - 1 - j {
                    t if t < len => dv[(b * len + t) * d + c],
                    _ => 0.0,
                };
                let taps = 0..k;
                let dx = taps.fold(0.0, |acc, j| conv.weight[c * k + j].mul_add(ahead(j), acc));
                dxz[(b * len + t) * 2 * d + c] = dx;
            }
        }
    }
    let mut outputs = vec![dxz];
    if op.weight_grad {
        let mut dweight = Vec::new();
        for c in 0..d {
            dweight.extend((0..k).map(|j| {
                token_sum(&op.sum, |piece| {
                    piece.fold(0.0, |acc, row| {
                        let x = conv.input(row / len, row % len, k - 1 - j, c);
                        dv[row * d + c].mul_add(x, acc)
                    })
                })
            }));
        }
        let column = |c: usize| {
            token_sum(&op.sum, |piece| {
                piece.fold(0.0, |a, row| a + dv[row * d + c])
            })
        };
        outputs.extend([dweight, (0..d).map(column).collect()]);
    }
    outputs
}

/// What a scan reads.
struct Inputs<'a> {
    shape: ScanShape,
    u: &'a [f32],
    dt: &'a [f32],
    bc: &'a [f32],
    xz: &'a [f32],
    a_log: &'a [f32],
    skip: &'a [f32],
    bias: &'a [f32],
}

impl<'a> Inputs<'a> {
    fn of(shape: ScanShape, reads: &'a [Values]) -> Self {
        Inputs {
            shape,
            u: reads[0].f32s(),
            dt: reads[1].f32s(),
            bc: reads[2].f32s(),
            xz: reads[3].f32s(),
            a_log: reads[4].f32s(),
            skip: reads[5].f32s(),
            bias: reads[6].f32s(),
        }
    }

    fn u(&self, row: usize, c: usize) -> f32 {
        self.u[row * self.shape.d_inner + c]
    }

    fn raw(&self, row: usize, c: usize) -> f32 {
        self.dt[row * self.shape.d_inner + c] + self.bias[c]
    }

    fn b(&self, row: usize, n: usize) -> f32 {
        self.bc[row * 2 * self.shape.d_state + n]
    }

    fn c(&self, row: usize, n: usize) -> f32 {
        self.bc[(row * 2 + 1) * self.shape.d_state + n]
    }

    fn z(&self, row: usize, c: usize) -> f32 {
        self.xz[(row * 2 + 1) * self.shape.d_inner + c]
    }

    fn a(&self, c: usize, n: usize) -> f32 {
        -exp(self.a_log[c * self.shape.d_state + n])
    }

    fn rate(&self, c: usize, n: usize) -> f32 {
        self.a(c, n) * std::f32::consts::LOG2_E
    }

    /// `decay(delta · rate_n)`.
    fn decay(&self, row: usize, c: usize, n: usize) -> f32 {
        decay(softplus(self.raw(row, c)) * self.rate(c, n))
    }

    /// `Σ_n a_n · b_n`: a chain for each four, and the tree over them.
    fn sum(&self, terms: impl Iterator<Item = (f32, f32)>) -> f32 {
        let terms: Vec<(f32, f32)> = terms.collect();
        let chain =
            |four: &[(f32, f32)]| four.iter().fold(0.0_f32, |acc, (a, b)| a.mul_add(*b, acc));
        tree(&terms.chunks(4).map(chain).collect::<Vec<f32>>())
    }

    /// The states after a row, from those before it.
    fn after(&self, row: usize, c: usize, h: &[f32]) -> Vec<f32> {
        let step = softplus(self.raw(row, c)) * self.u(row, c);
        let next = |(n, &h): (usize, &f32)| self.decay(row, c, n).mul_add(h, step * self.b(row, n));
        h.iter().enumerate().map(next).collect()
    }

    fn y(&self, row: usize, c: usize, h: &[f32]) -> f32 {
        let states = h.iter().enumerate();
        let y = self.sum(states.map(|(n, &h)| (self.c(row, n), h)));
        self.skip[c].mul_add(self.u(row, c), y)
    }
}

pub fn scan(op: &Scan, case: &Case) -> Vec<Vec<f32>> {
    let (shape, inputs) = (op.shape, Inputs::of(op.shape, &case.reads));
    let (d, n, len) = (shape.d_inner, shape.d_state, shape.seq_len);
    let mut out = vec![0.0; shape.rows() * d];
    let mut starts = vec![0.0; shape.batch * shape.chunks() * d * n];
    let mut end = Vec::new();
    for b in 0..shape.batch {
        for c in 0..d {
            let mut h = vec![0.0; n];
            if op.carried && flags(&case.reads[8])[b] != 0 {
                h.copy_from_slice(&case.reads[7].f32s()[(b * d + c) * n..][..n]);
            }
            for (i, h) in h.iter_mut().enumerate() {
                *h = inputs.rate(c, i).mul_add(0.0, *h);
            }
            for t in 0..len {
                let row = b * len + t;
                if t % shape.chunk == 0 {
                    let chunk = b * shape.chunks() + t / shape.chunk;
                    starts[(chunk * d + c) * n..][..n].copy_from_slice(&h);
                }
                h = inputs.after(row, c, &h);
                let z = inputs.z(row, c);
                out[row * d + c] = inputs.y(row, c, &h) * (z * sigmoid(z));
            }
            end.extend(h);
        }
    }
    let mut outputs = vec![out, starts];
    if op.carried {
        outputs.push(end);
    }
    outputs
}

/// The terms of one channel's gradients, by row and state.
struct Terms {
    db: Vec<Vec<f32>>,
    dc: Vec<Vec<f32>>,
    e: Vec<Vec<f32>>,
    dy: Vec<f32>,
    ddt: Vec<f32>,
    du: Vec<f32>,
    dz: Vec<f32>,
    out: Vec<f32>,
    /// By sequence.
    dstate: Vec<Vec<f32>>,
}

fn channel(op: &ScanGrad, inputs: &Inputs, c: usize, (dout, starts): (&[f32], &[f32])) -> Terms {
    let shape = op.shape;
    let (d, n, len, rows) = (shape.d_inner, shape.d_state, shape.seq_len, shape.rows());
    let table = || vec![vec![0.0; n]; rows];
    let mut terms = Terms {
        db: table(),
        dc: table(),
        e: table(),
        dy: vec![0.0; rows],
        ddt: vec![0.0; rows],
        du: vec![0.0; rows],
        dz: vec![0.0; rows],
        out: vec![0.0; rows],
        dstate: Vec::new(),
    };
    for b in 0..shape.batch {
        let mut before = Vec::new();
        let mut h = Vec::new();
        for t in 0..len {
            if t % shape.chunk == 0 {
                let chunk = b * shape.chunks() + t / shape.chunk;
                h = starts[(chunk * d + c) * n..][..n].to_vec();
            }
            before.push(h.clone());
            h = inputs.after(b * len + t, c, &h);
        }
        let mut g = vec![0.0; n];
        for t in (0..len).rev() {
            let row = b * len + t;
            let after = inputs.after(row, c, &before[t]);
            let (dout, z) = (dout[row * d + c], inputs.z(row, c));
            let (s, delta) = (sigmoid(z), softplus(inputs.raw(row, c)));
            let dy = dout * (z * s);
            terms.dy[row] = dy;
            let y = inputs.y(row, c, &after);
            terms.dz[row] = (dout * y) * (s * z.mul_add(1.0 - s, 1.0));
            terms.out[row] = y * (z * s);
            for (i, g) in g.iter_mut().enumerate() {
                *g = inputs.c(row, i).mul_add(dy, *g);
            }
            let p = inputs.sum((0..n).map(|i| (inputs.b(row, i), g[i])));
            for i in 0..n {
                terms.db[row][i] = g[i] * (delta * inputs.u(row, c));
                terms.dc[row][i] = dy * after[i];
                g[i] *= inputs.decay(row, c, i);
                terms.e[row][i] = g[i] * before[t][i];
            }
            let q = inputs.sum((0..n).map(|i| (inputs.rate(c, i), terms.e[row][i])));
            let slope = p.mul_add(inputs.u(row, c), q * std::f32::consts::LN_2);
            terms.du[row] = inputs.skip[c].mul_add(dy, p * delta);
            terms.ddt[row] = slope * sigmoid(inputs.raw(row, c));
        }
        terms.dstate.push(g);
    }
    terms
}

pub fn scan_grad(op: &ScanGrad, case: &Case) -> Vec<Vec<f32>> {
    let shape = op.shape;
    let (d, n, rows) = (shape.d_inner, shape.d_state, shape.rows());
    let inputs = Inputs::of(shape, &case.reads[1..8]);
    let given = (case.reads[0].f32s(), case.reads[8].f32s());
    let channels: Vec<Terms> = (0..d).map(|c| channel(op, &inputs, c, given)).collect();
    let by_row = |term: fn(&Terms) -> &Vec<f32>| {
        let rows = (0..rows).flat_map(|row| channels.iter().map(move |c| term(c)[row]));
        rows.collect::<Vec<f32>>()
    };
    let mut dbc = Vec::new();
    for row in 0..rows {
        let over = |term: &dyn Fn(&Terms) -> f32| {
            let leaves: Vec<f32> = channels.iter().map(term).collect();
            tree(&leaves)
        };
        dbc.extend((0..n).map(|i| over(&|c| c.db[row][i])));
        dbc.extend((0..n).map(|i| over(&|c| c.dc[row][i])));
    }
    let mut dxz = case.writes[3].f32s().to_vec();
    for (row, dxz) in dxz.chunks_mut(2 * d).enumerate() {
        for (c, terms) in channels.iter().enumerate() {
            dxz[d + c] = terms.dz[row];
        }
    }
    let mut outputs = vec![by_row(|c| &c.du), by_row(|c| &c.ddt), dbc, dxz];
    if op.weight_grad {
        let scaled = |step: &dyn Fn(usize, f32) -> f32, factor: Option<f32>| {
            token_sum(&op.sum, |piece| {
                let chain = piece.rev().fold(0.0, |acc, row| step(row, acc));
                factor.map_or(chain, |factor| chain * factor)
            })
        };
        let sum = |step: &dyn Fn(usize, f32) -> f32| scaled(step, None);
        let (mut da_log, mut dskip, mut dbias) = (Vec::new(), Vec::new(), Vec::new());
        for (c, terms) in channels.iter().enumerate() {
            let delta = |row| softplus(inputs.raw(row, c));
            da_log.extend((0..n).map(|i| {
                let step = |row: usize, acc| terms.e[row][i].mul_add(delta(row), acc);
                scaled(&step, Some(inputs.a(c, i)))
            }));
            dskip.push(sum(&|row, acc| {
                terms.dy[row].mul_add(inputs.u(row, c), acc)
            }));
            dbias.push(sum(&|row, acc| acc + terms.ddt[row]));
        }
        outputs.extend([da_log, dskip, dbias]);
    }
    if op.state_grad {
        let states = (0..shape.batch).flat_map(|b| channels.iter().map(move |c| &c.dstate[b]));
        outputs.push(states.flatten().copied().collect());
    }
    if op.restore {
        outputs.push(by_row(|c| &c.out));
    }
    outputs
}
