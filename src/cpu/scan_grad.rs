//! The backward of the selective scan on the CPU: the parts of forward, chunks from the last to the first.

use rayon::prelude::*;

use super::arena::Operands;
use super::context::CpuContext;
use super::rows::{expect_len, fold};
use super::scan::{
    Inputs, Lanes, Part, Position, StateSum, WIDTH, Weights, accumulate, advance, decays,
    place_rows,
};
use super::simd::{Task, dispatch};
use crate::error::DeviceError;
use crate::num::sigmoid;
use crate::num::tree::tree_sum;
use crate::op::scan::{ScanGrad, ScanShape};

/// ln 2, rounded once.
const LN_2: f32 = f32::from_bits(0x3f31_7218);

struct Backward<'a> {
    inputs: Inputs<'a>,
    part: Part,
    dout: &'a [f32],
    starts: &'a [f32],
}

/// What a task gives. The first four are [seq_len, channels], `dbc` is [seq_len, 2 d_state] with the
/// tree over the task's channels alone.
struct Gradients {
    du: Vec<f32>,
    ddt: Vec<f32>,
    dz: Vec<f32>,
    /// The output of forward.
    out: Vec<f32>,
    dbc: Vec<f32>,
    /// [channels, d_state].
    da_log: Vec<f32>,
    dskip: Lanes,
    ddt_bias: Lanes,
    dstate: Vec<f32>,
}

/// The running sums of a task.
struct Sums {
    /// The gradient of the state.
    g: Vec<Lanes>,
    da_log: Vec<Lanes>,
    dskip: Lanes,
    ddt_bias: Lanes,
}

/// The states of one chunk: those before each position and after the last, and the decays.
struct Chunk {
    states: Vec<Lanes>,
    decays: Vec<Lanes>,
}

/// The balanced tree over the values, which it overwrites: neighbours are added, then neighbours of those.
#[inline(always)]
fn tree(values: &mut [f32]) -> f32 {
    let mut n = values.len();
    while n > 1 {
        for i in 0..n / 2 {
            values[i] = values[2 * i] + values[2 * i + 1];
        }
        if !n.is_multiple_of(2) {
            values[n / 2] = values[n - 1];
        }
        n = n.div_ceil(2);
    }
    values[0]
}

impl Backward<'_> {
    /// Computes the states of chunk `index` again from its start.
    #[inline(always)]
    fn chunk(&self, weights: &Weights, index: usize, chunk: &mut Chunk) {
        let (shape, part) = (self.inputs.shape, &self.part);
        let (n, each) = (shape.d_state, shape.d_inner * shape.d_state);
        let start = &self.starts[(part.sequence * shape.chunks() + index) * each..][..each];
        part.states(start, n, &mut chunk.states[..n]);
        for (i, t) in positions(&shape, index).enumerate() {
            let at = Position::at(&self.inputs, part, &weights.dt_bias, t);
            let (before, after) = chunk.states.split_at_mut((i + 1) * n);
            for k in 0..n {
                let a = decays(&at.delta, &weights.rates[k]);
                let mut h = before[i * n + k];
                advance(&mut h, &a, &at.step, at.b[k]);
                after[k] = h;
                chunk.decays[i * n + k] = a;
            }
        }
    }

    /// One position, the `i`th of its chunk.
    #[inline(always)]
    fn position(
        &self,
        weights: &Weights,
        (chunk, i): (&Chunk, usize),
        t: usize,
        (sums, out): (&mut Sums, &mut Gradients),
    ) {
        let (shape, part) = (self.inputs.shape, &self.part);
        let (n, d) = (shape.d_state, shape.d_inner);
        let at = Position::at(&self.inputs, part, &weights.dt_bias, t);
        let row = part.sequence * shape.seq_len + t;
        let dout = part.lanes(&self.dout[row * d..], 0);
        let before = &chunk.states[i * n..][..n];
        let after = &chunk.states[(i + 1) * n..][..n];
        let decays = &chunk.decays[i * n..][..n];
        let mut sum = StateSum::new(n);
        for (k, h) in after.iter().enumerate() {
            accumulate(sum.chain(k), h, at.c[k]);
        }
        let y = sum.total();
        let (mut dy, mut dz, mut output) = ([0.0; WIDTH], [0.0; WIDTH], [0.0; WIDTH]);
        for j in 0..WIDTH {
            let y = weights.skip[j].mul_add(at.u[j], y[j]);
            let (z, s) = (at.z[j], sigmoid(at.z[j]));
            dy[j] = dout[j] * (z * s);
            dz[j] = (dout[j] * y) * (s * z.mul_add(1.0 - s, 1.0));
            output[j] = y * (z * s);
        }
        let (mut p, mut q) = (StateSum::new(n), StateSum::new(n));
        let dbc = &mut out.dbc[t * 2 * n..][..2 * n];
        for k in 0..n {
            let (g, a) = (&mut sums.g[k], &decays[k]);
            let (mut db, mut dc) = ([0.0; WIDTH], [0.0; WIDTH]);
            accumulate(g, &dy, at.c[k]);
            accumulate(p.chain(k), g, at.b[k]);
            let (q, rate) = (q.chain(k), &weights.rates[k]);
            for j in 0..WIDTH {
                db[j] = g[j] * at.step[j];
                dc[j] = dy[j] * after[k][j];
                g[j] *= a[j];
                let e = g[j] * before[k][j];
                q[j] = rate[j].mul_add(e, q[j]);
                sums.da_log[k][j] = e.mul_add(at.delta[j], sums.da_log[k][j]);
            }
            dbc[k] = tree(&mut db[..part.count]);
            dbc[n + k] = tree(&mut dc[..part.count]);
        }
        let (p, q) = (p.total(), q.total());
        let (mut du, mut ddt) = ([0.0; WIDTH], [0.0; WIDTH]);
        for j in 0..WIDTH {
            du[j] = weights.skip[j].mul_add(dy[j], p[j] * at.delta[j]);
            ddt[j] = p[j].mul_add(at.u[j], q[j] * LN_2) * sigmoid(at.raw[j]);
            sums.dskip[j] = dy[j].mul_add(at.u[j], sums.dskip[j]);
            sums.ddt_bias[j] += ddt[j];
        }
        let place = t * part.count..(t + 1) * part.count;
        out.du[place.clone()].copy_from_slice(&du[..part.count]);
        out.ddt[place.clone()].copy_from_slice(&ddt[..part.count]);
        out.dz[place.clone()].copy_from_slice(&dz[..part.count]);
        out.out[place].copy_from_slice(&output[..part.count]);
    }
}

/// The positions of a chunk, ascending.
fn positions(shape: &ScanShape, index: usize) -> std::ops::Range<usize> {
    index * shape.chunk..((index + 1) * shape.chunk).min(shape.seq_len)
}

impl Task for Backward<'_> {
    type Out = Gradients;

    #[inline(always)]
    fn run(self) -> Gradients {
        let (shape, part) = (self.inputs.shape, self.part);
        let n = shape.d_state;
        let weights = Weights::of(&self.inputs, &part);
        let longest = shape.chunk.min(shape.seq_len);
        let mut chunk = Chunk {
            states: vec![[0.0; WIDTH]; (longest + 1) * n],
            decays: vec![[0.0; WIDTH]; longest * n],
        };
        let mut sums = Sums {
            g: vec![[0.0; WIDTH]; n],
            da_log: vec![[0.0; WIDTH]; n],
            dskip: [0.0; WIDTH],
            ddt_bias: [0.0; WIDTH],
        };
        let rows = || vec![0.0; shape.seq_len * part.count];
        let mut out = Gradients {
            du: rows(),
            ddt: rows(),
            dz: rows(),
            out: rows(),
            dbc: vec![0.0; shape.seq_len * 2 * n],
            da_log: Vec::new(),
            dskip: [0.0; WIDTH],
            ddt_bias: [0.0; WIDTH],
            dstate: Vec::new(),
        };
        for index in (0..shape.chunks()).rev() {
            self.chunk(&weights, index, &mut chunk);
            for (i, t) in positions(&shape, index).enumerate().rev() {
                self.position(&weights, (&chunk, i), t, (&mut sums, &mut out));
            }
        }
        for (sums, a) in sums.da_log.iter_mut().zip(&weights.a) {
            for (sum, a) in sums.iter_mut().zip(a) {
                *sum *= a;
            }
        }
        part.store_states(&sums.da_log, &mut out.da_log);
        part.store_states(&sums.g, &mut out.dstate);
        (out.dskip, out.ddt_bias) = (sums.dskip, sums.ddt_bias);
        out
    }
}

/// Where the gradients go.
struct Outputs<'a> {
    du: &'a mut [f32],
    ddt: &'a mut [f32],
    dbc: &'a mut [f32],
    dxz: &'a mut [f32],
    /// Of `a_log`, `skip` and `dt_bias`.
    weights: Option<[&'a mut [f32]; 3]>,
    dstate: Option<&'a mut [f32]>,
    out: Option<&'a mut [f32]>,
}

impl<'a> Outputs<'a> {
    fn of(op: &ScanGrad, operands: &mut Operands<'a>) -> Result<Self, DeviceError> {
        let outputs = Outputs {
            du: operands.write(0)?,
            ddt: operands.write(1)?,
            dbc: operands.write(2)?,
            dxz: operands.write(3)?,
            weights: match op.weight_grad {
                true => Some([operands.write(4)?, operands.write(5)?, operands.write(6)?]),
                false => None,
            },
            dstate: match op.state_grad {
                true => Some(operands.write(4 + 3 * usize::from(op.weight_grad))?),
                false => None,
            },
            out: match op.restore {
                true => {
                    let more = 3 * usize::from(op.weight_grad) + usize::from(op.state_grad);
                    Some(operands.write(4 + more)?)
                }
                false => None,
            },
        };
        let (rows, d, n) = (op.shape.rows(), op.shape.d_inner, op.shape.d_state);
        expect_len("du", rows * d, outputs.du.len())?;
        expect_len("ddt", rows * d, outputs.ddt.len())?;
        expect_len("dbc", rows * 2 * n, outputs.dbc.len())?;
        expect_len("dxz", rows * 2 * d, outputs.dxz.len())?;
        if let Some([da_log, dskip, ddt_bias]) = &outputs.weights {
            expect_len("da_log", d * n, da_log.len())?;
            expect_len("dskip", d, dskip.len())?;
            expect_len("ddt_bias", d, ddt_bias.len())?;
        }
        if let Some(dstate) = &outputs.dstate {
            expect_len("dstate", op.shape.batch * d * n, dstate.len())?;
        }
        if let Some(out) = &outputs.out {
            expect_len("out", rows * d, out.len())?;
        }
        Ok(outputs)
    }

    /// What belongs to rows: every part in its columns, `dbc` folded over the parts.
    fn rows(&mut self, shape: &ScanShape, parts: &[Part], found: &[Gradients]) {
        let (d, n, len) = (shape.d_inner, shape.d_state, shape.seq_len);
        let a_sequence = parts.len() / shape.batch;
        let sequences = parts.chunks(a_sequence).zip(found.chunks(a_sequence));
        for (b, (parts, found)) in sequences.enumerate() {
            for (part, found) in parts.iter().zip(found) {
                place_rows(
                    &mut self.du[b * len * d..][..len * d],
                    d,
                    (part, 0),
                    &found.du,
                );
                let ddt = &mut self.ddt[b * len * d..][..len * d];
                place_rows(ddt, d, (part, 0), &found.ddt);
                let dxz = &mut self.dxz[b * len * 2 * d..][..len * 2 * d];
                place_rows(dxz, 2 * d, (part, d), &found.dz);
                if let Some(out) = &mut self.out {
                    let out = &mut out[b * len * d..][..len * d];
                    place_rows(out, d, (part, 0), &found.out);
                }
            }
            let dbc = &mut self.dbc[b * len * 2 * n..][..len * 2 * n];
            for (i, dbc) in dbc.iter_mut().enumerate() {
                *dbc = tree_sum(found.iter().map(|found| found.dbc[i]));
            }
        }
    }

    /// The sums over tokens, a piece a sequence, and the gradients of the first states.
    fn sums(&mut self, op: &ScanGrad, parts: &[Part], found: &[Gradients]) {
        let (d, n, batch) = (op.shape.d_inner, op.shape.d_state, op.shape.batch);
        if let Some(weights) = &mut self.weights {
            for (which, (out, each)) in weights.iter_mut().zip([n, 1, 1]).enumerate() {
                let mut partials = vec![0.0; batch * d * each];
                for (part, found) in parts.iter().zip(found) {
                    let values = match which {
                        0 => found.da_log.as_slice(),
                        1 => &found.dskip[..part.count],
                        _ => &found.ddt_bias[..part.count],
                    };
                    let place = (part.sequence * d + part.first) * each;
                    partials[place..][..part.count * each].copy_from_slice(values);
                }
                match fold(&op.sum, &mut partials, d * each) {
                    Some(root) => out.copy_from_slice(&partials[root * d * each..][..d * each]),
                    None => out.fill(0.0),
                }
            }
        }
        if let Some(dstate) = &mut self.dstate {
            for (part, found) in parts.iter().zip(found) {
                let place = (part.sequence * d + part.first) * n;
                dstate[place..][..part.count * n].copy_from_slice(&found.dstate);
            }
        }
    }
}

/// The gradients of everything that forward reads.
///
/// # Errors
/// Operands that are missing or of the wrong size; a cut into pieces that are not sequences.
pub fn grad(
    context: &CpuContext,
    op: &ScanGrad,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let shape = op.shape;
    let dout: &[f32] = operands.read(0)?;
    let inputs = Inputs::of(shape, operands, 1)?;
    let starts: &[f32] = operands.read(8)?;
    let each = shape.d_inner * shape.d_state;
    expect_len("dout", shape.rows() * shape.d_inner, dout.len())?;
    expect_len("starts", shape.batch * shape.chunks() * each, starts.len())?;
    let mut outputs = Outputs::of(op, operands)?;
    expect_len("pieces", shape.batch, op.sum.pieces())?;
    if shape.rows() * shape.d_inner == 0 {
        return Ok(());
    }
    let (path, parts) = (context.path(), inputs.parts());
    let run = |&part: &Part| {
        let task = Backward {
            inputs,
            part,
            dout,
            starts,
        };
        dispatch(path, task)
    };
    let found: Vec<Gradients> = context.run(|| parts.par_iter().map(run).collect());
    outputs.rows(&shape, &parts, &found);
    outputs.sums(op, &parts, &found);
    Ok(())
}
