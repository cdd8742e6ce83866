//! The selective scan on the CPU: a task is some channels of one sequence, positions in order.
//!
//! Channels are the vector lanes, so a channel's chain of roundings never depends on how they are cut.

use rayon::prelude::*;

use super::arena::Operands;
use super::context::CpuContext;
use super::rows::expect_len;
use super::simd::{Task, dispatch};
use crate::error::DeviceError;
use crate::model::mamba_config::D_STATE_MAX;
use crate::num::{LOG2_E, decay, exp, sigmoid, softplus};
use crate::op::scan::{STATE_GROUP, Scan, ScanShape};

/// Channels of a task: a power of two, so that a task's channels are a whole branch of the tree over them.
pub(super) const WIDTH: usize = 32;

/// One number a channel of a task; those beyond the last channel are computed and left out.
pub(super) type Lanes = [f32; WIDTH];

/// The operands that both directions read.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    pub shape: ScanShape,
    pub u: &'a [f32],
    pub dt: &'a [f32],
    pub bc: &'a [f32],
    pub xz: &'a [f32],
    pub a_log: &'a [f32],
    pub skip: &'a [f32],
    pub dt_bias: &'a [f32],
}

impl<'a> Inputs<'a> {
    /// The seven operands from read operand `first` on.
    pub fn of(
        shape: ScanShape,
        operands: &Operands<'a>,
        first: usize,
    ) -> Result<Self, DeviceError> {
        let inputs = Inputs {
            shape,
            u: operands.read(first)?,
            dt: operands.read(first + 1)?,
            bc: operands.read(first + 2)?,
            xz: operands.read(first + 3)?,
            a_log: operands.read(first + 4)?,
            skip: operands.read(first + 5)?,
            dt_bias: operands.read(first + 6)?,
        };
        let (rows, d, n) = (shape.rows(), shape.d_inner, shape.d_state);
        expect_len("d_state", n.min(D_STATE_MAX), n)?;
        expect_len("u", rows * d, inputs.u.len())?;
        expect_len("dt", rows * d, inputs.dt.len())?;
        expect_len("bc", rows * 2 * n, inputs.bc.len())?;
        expect_len("xz", rows * 2 * d, inputs.xz.len())?;
        expect_len("a_log", d * n, inputs.a_log.len())?;
        expect_len("skip", d, inputs.skip.len())?;
        expect_len("dt_bias", d, inputs.dt_bias.len())?;
        Ok(inputs)
    }

    /// The tasks: every part of the channels of every sequence, sequence by sequence.
    pub fn parts(&self) -> Vec<Part> {
        let d = self.shape.d_inner;
        let firsts = (0..d).step_by(WIDTH);
        let parts = |sequence| {
            firsts.clone().map(move |first| Part {
                sequence,
                first,
                count: WIDTH.min(d - first),
            })
        };
        (0..self.shape.batch).flat_map(parts).collect()
    }
}

/// Neighbouring channels of one sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub sequence: usize,
    pub first: usize,
    pub count: usize,
}

impl Part {
    /// This part of a row of `columns` elements, or of its right half where `offset` is the left one.
    #[inline(always)]
    pub fn lanes(&self, row: &[f32], offset: usize) -> Lanes {
        let mut lanes = [0.0; WIDTH];
        let part = &row[offset + self.first..][..self.count];
        lanes[..self.count].copy_from_slice(part);
        lanes
    }

    /// A [channels, d_state] matrix of the whole width as one set of lanes a state.
    #[inline(always)]
    pub fn states(&self, matrix: &[f32], d_state: usize, states: &mut [Lanes]) {
        for (n, lanes) in states.iter_mut().enumerate() {
            for (i, x) in lanes.iter_mut().enumerate().take(self.count) {
                *x = matrix[(self.first + i) * d_state + n];
            }
        }
    }

    /// Appends the states as [channels, d_state].
    #[inline(always)]
    pub fn store_states(&self, states: &[Lanes], out: &mut Vec<f32>) {
        for i in 0..self.count {
            out.extend(states.iter().map(|lanes| lanes[i]));
        }
    }
}

/// What a task reads of the weights.
pub(super) struct Weights {
    /// `A_n = -exp(a_log_n)`.
    pub a: Vec<Lanes>,
    /// `A_n · log2(e)`.
    pub rates: Vec<Lanes>,
    pub skip: Lanes,
    pub dt_bias: Lanes,
}

impl Weights {
    #[inline(always)]
    pub fn of(inputs: &Inputs, part: &Part) -> Self {
        let n = inputs.shape.d_state;
        let mut a = vec![[0.0; WIDTH]; n];
        part.states(inputs.a_log, n, &mut a);
        let mut rates = a.clone();
        for (a, rates) in a.iter_mut().zip(&mut rates) {
            for (a, rate) in a.iter_mut().zip(rates) {
                *a = -exp(*a);
                *rate = *a * LOG2_E;
            }
        }
        Weights {
            a,
            rates,
            skip: part.lanes(inputs.skip, 0),
            dt_bias: part.lanes(inputs.dt_bias, 0),
        }
    }
}

/// What one position of a part reads.
pub(super) struct Position<'a> {
    pub u: Lanes,
    /// `dt + dt_bias`.
    pub raw: Lanes,
    pub delta: Lanes,
    /// `delta · u`.
    pub step: Lanes,
    pub b: &'a [f32],
    pub c: &'a [f32],
    pub z: Lanes,
}

impl<'a> Position<'a> {
    #[inline(always)]
    pub fn at(inputs: &Inputs<'a>, part: &Part, bias: &Lanes, t: usize) -> Self {
        let (d, n) = (inputs.shape.d_inner, inputs.shape.d_state);
        let row = part.sequence * inputs.shape.seq_len + t;
        let u = part.lanes(&inputs.u[row * d..], 0);
        let mut raw = part.lanes(&inputs.dt[row * d..], 0);
        let (mut delta, mut step) = ([0.0; WIDTH], [0.0; WIDTH]);
        for i in 0..WIDTH {
            raw[i] += bias[i];
            delta[i] = softplus(raw[i]);
        }
        for i in 0..WIDTH {
            step[i] = delta[i] * u[i];
        }
        let (b, c) = inputs.bc[row * 2 * n..][..2 * n].split_at(n);
        Position {
            u,
            raw,
            delta,
            step,
            b,
            c,
            z: part.lanes(&inputs.xz[row * 2 * d..], d),
        }
    }
}

/// `decay(delta · rate_n)`.
#[inline(always)]
pub(super) fn decays(delta: &Lanes, rate: &Lanes) -> Lanes {
    let mut decays = [0.0; WIDTH];
    for i in 0..WIDTH {
        decays[i] = decay(delta[i] * rate[i]);
    }
    decays
}

/// A sum over states: a chain for each group, and the tree over the groups.
pub(super) struct StateSum {
    groups: [Lanes; GROUPS],
    count: usize,
}

/// Groups of the most states.
const GROUPS: usize = D_STATE_MAX.div_ceil(STATE_GROUP);

impl StateSum {
    #[inline(always)]
    pub fn new(d_state: usize) -> Self {
        StateSum {
            groups: [[0.0; WIDTH]; GROUPS],
            count: d_state.div_ceil(STATE_GROUP).min(GROUPS),
        }
    }

    /// The chain that state `n` goes to.
    #[inline(always)]
    pub fn chain(&mut self, n: usize) -> &mut Lanes {
        &mut self.groups[n / STATE_GROUP % GROUPS]
    }

    #[inline(always)]
    pub fn total(mut self) -> Lanes {
        // Level by level: neighbours, then neighbours of those; one without a neighbour stays.
        let mut span = 1;
        while span < self.count {
            for i in (0..self.count - span).step_by(2 * span) {
                let right = self.groups[i + span];
                for (left, right) in self.groups[i].iter_mut().zip(right) {
                    *left += right;
                }
            }
            span *= 2;
        }
        self.groups[0]
    }
}

/// `h = fma(decay, h, step · b)`.
#[inline(always)]
pub(super) fn advance(h: &mut Lanes, decay: &Lanes, step: &Lanes, b: f32) {
    for i in 0..WIDTH {
        h[i] = decay[i].mul_add(h[i], step[i] * b);
    }
}

/// `acc = fma(x, factor, acc)`.
#[inline(always)]
pub(super) fn accumulate(acc: &mut Lanes, x: &Lanes, factor: f32) {
    for i in 0..WIDTH {
        acc[i] = factor.mul_add(x[i], acc[i]);
    }
}

/// `z · sigmoid(z)`.
#[inline(always)]
fn silu(z: &Lanes) -> Lanes {
    let mut gate = [0.0; WIDTH];
    for i in 0..WIDTH {
        gate[i] = z[i] * sigmoid(z[i]);
    }
    gate
}

struct Forward<'a> {
    inputs: Inputs<'a>,
    part: Part,
    /// The states that the sequence goes on from, [d_inner, d_state]; `None` for zeros.
    state: Option<&'a [f32]>,
}

/// What a task gives: [seq_len, channels], [chunks, channels, d_state], [channels, d_state].
struct Scanned {
    out: Vec<f32>,
    starts: Vec<f32>,
    end: Vec<f32>,
}

impl Task for Forward<'_> {
    type Out = Scanned;

    #[inline(always)]
    fn run(self) -> Scanned {
        let (inputs, part, shape) = (&self.inputs, &self.part, self.inputs.shape);
        let weights = Weights::of(inputs, part);
        let mut h = vec![[0.0; WIDTH]; shape.d_state];
        if let Some(state) = self.state {
            part.states(state, shape.d_state, &mut h);
        }
        // No state changes, unless a rate is not finite.
        for (h, rate) in h.iter_mut().zip(&weights.rates) {
            accumulate(h, rate, 0.0);
        }
        let mut scanned = Scanned {
            out: Vec::with_capacity(shape.seq_len * part.count),
            starts: Vec::with_capacity(shape.chunks() * part.count * shape.d_state),
            end: Vec::with_capacity(part.count * shape.d_state),
        };
        for t in 0..shape.seq_len {
            if t.is_multiple_of(shape.chunk) {
                part.store_states(&h, &mut scanned.starts);
            }
            let at = Position::at(inputs, part, &weights.dt_bias, t);
            let mut sum = StateSum::new(shape.d_state);
            for (n, h) in h.iter_mut().enumerate() {
                advance(h, &decays(&at.delta, &weights.rates[n]), &at.step, at.b[n]);
                accumulate(sum.chain(n), h, at.c[n]);
            }
            let mut y = sum.total();
            let gate = silu(&at.z);
            for i in 0..WIDTH {
                y[i] = weights.skip[i].mul_add(at.u[i], y[i]) * gate[i];
            }
            scanned.out.extend(&y[..part.count]);
        }
        part.store_states(&h, &mut scanned.end);
        scanned
    }
}

/// Runs every part of every sequence; `state` and `keep` are empty unless the scan is carried.
fn scan_parts(
    context: &CpuContext,
    inputs: Inputs,
    parts: &[Part],
    (state, keep): (&[f32], &[u32]),
) -> Vec<Scanned> {
    let path = context.path();
    let each = inputs.shape.d_inner * inputs.shape.d_state;
    let run = |&part: &Part| {
        let kept = keep.get(part.sequence).is_some_and(|&keep| keep != 0);
        let state = kept.then(|| &state[part.sequence * each..][..each]);
        let task = Forward {
            inputs,
            part,
            state,
        };
        dispatch(path, task)
    };
    context.run(|| parts.par_iter().map(run).collect())
}

/// Puts a part's [rows, channels] in its columns of [rows, columns], from column `offset` on.
pub(super) fn place_rows(
    matrix: &mut [f32],
    columns: usize,
    (part, offset): (&Part, usize),
    values: &[f32],
) {
    let rows = matrix.chunks_exact_mut(columns);
    for (row, values) in rows.zip(values.chunks_exact(part.count)) {
        row[offset + part.first..][..part.count].copy_from_slice(values);
    }
}

/// `out`, the stored states, and the last ones where the scan is carried.
///
/// # Errors
/// Operands that are missing or of the wrong size.
pub fn forward(
    context: &CpuContext,
    op: &Scan,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let shape = op.shape;
    let inputs = Inputs::of(shape, operands, 0)?;
    let (d, n) = (shape.d_inner, shape.d_state);
    let out: &mut [f32] = operands.write(0)?;
    let starts: &mut [f32] = operands.write(1)?;
    expect_len("out", shape.rows() * d, out.len())?;
    expect_len("starts", shape.batch * shape.chunks() * d * n, starts.len())?;
    let carried: (&[f32], &[u32], &mut [f32]) = match op.carried {
        true => (operands.read(7)?, operands.read(8)?, operands.write(2)?),
        false => (&[], &[], &mut []),
    };
    let (state, keep, next) = carried;
    if op.carried {
        expect_len("state", shape.batch * d * n, state.len())?;
        expect_len("keep", shape.batch, keep.len())?;
        expect_len("state_next", shape.batch * d * n, next.len())?;
    }
    if shape.rows() * d == 0 {
        return Ok(());
    }
    let parts = inputs.parts();
    let scanned = scan_parts(context, inputs, &parts, (state, keep));
    for (part, scanned) in parts.iter().zip(&scanned) {
        let b = part.sequence;
        let rows = &mut out[b * shape.seq_len * d..][..shape.seq_len * d];
        place_rows(rows, d, (part, 0), &scanned.out);
        let chunks = &mut starts[b * shape.chunks() * d * n..][..shape.chunks() * d * n];
        let width = part.count * n;
        let chunks = chunks.chunks_exact_mut(d * n);
        for (chunk, values) in chunks.zip(scanned.starts.chunks_exact(width)) {
            chunk[part.first * n..][..width].copy_from_slice(values);
        }
        if op.carried {
            next[(b * d + part.first) * n..][..width].copy_from_slice(&scanned.end);
        }
    }
    Ok(())
}
