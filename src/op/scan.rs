//! The selective scan of Mamba with the softplus of its time steps, its skip and its gate. Forward assigns;
//! backward assigns everything but the gradient of `xz`, of which it writes the right half of the rows.
//!
//! Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023, section 3.

use serde::{Deserialize, Serialize};

use super::{Access, OpCall, OpRule, Operand, Signature, Store};
use crate::error::PlanError;
use crate::grad::GradBuilder;
use crate::num::tree::TokenSum;
use crate::shape::{DType, Math};

/// Positions between two states that forward stores; backward computes the others again. Decides memory
/// and no bit.
pub const SCAN_CHUNK: usize = 16;

/// Neighbouring states whose sum is one chain; the tree adds the groups. The last one may be shorter.
pub const STATE_GROUP: usize = 4;

/// The sizes of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScanShape {
    pub batch: usize,
    pub seq_len: usize,
    pub d_inner: usize,
    /// States of a channel.
    pub d_state: usize,
    /// Positions from one stored state to the next.
    pub chunk: usize,
}

impl ScanShape {
    /// Tokens of the batch.
    pub fn rows(&self) -> usize {
        self.batch * self.seq_len
    }

    /// Stored states of a sequence: those before the first position of each chunk.
    pub fn chunks(&self) -> usize {
        self.seq_len.div_ceil(self.chunk.max(1))
    }

    /// The states of all channels of all sequences at one position.
    pub fn state(&self) -> [usize; 3] {
        [self.batch, self.d_inner, self.d_state]
    }

    fn starts(&self) -> [usize; 4] {
        [self.batch, self.chunks(), self.d_inner, self.d_state]
    }

    fn reads(&self, math: Math) -> Vec<Operand> {
        let (rows, d, n, storage) = (self.rows(), self.d_inner, self.d_state, math.storage());
        vec![
            Operand::read("u", [rows, d], storage),
            Operand::read("dt", [rows, d], storage),
            Operand::read("bc", [rows, 2 * n], storage),
            Operand::read("xz", [rows, 2 * d], storage),
            Operand::read("a_log", [d, n], DType::F32),
            Operand::read("skip", [d], DType::F32),
            Operand::read("dt_bias", [d], DType::F32),
        ]
    }

    /// Operations of a pass with `each` multiply-adds a state and position.
    fn flops(&self, each: u64) -> u64 {
        2 * each * (self.rows() * self.d_inner * self.d_state) as u64
    }
}

/// For each sequence and channel, positions in order, from a state `h` of `+0.0`, or of `state` where the
/// scan is `carried` and the sequence's flag in `keep` is not 0. A row of `bc` holds `B` then `C`, the right
/// half of a row of `xz` is `z`, `rate_n = -(exp(a_log_n) · log2(e))`, and [`decay`] is the contract's `2^x`:
///
/// ```text
/// h_n   = fma(rate_n, 0, h_n)                        once, before the first position
/// delta = softplus(dt + dt_bias)
/// h_n   = fma(decay(delta · rate_n), h_n, (delta · u) · B_n)
/// y     = Σ_n C_n · h_n;  y = fma(skip, u, y)
/// out   = y · (z · sigmoid(z))
/// ```
///
/// A sum over states is an fma chain over each [`STATE_GROUP`] neighbours, ascending, and the balanced tree
/// over those. The line before the first position changes no state, unless a rate is not finite: then it
/// shows as a NaN.
///
/// [`decay`]: crate::num::decay
///
/// `starts` takes the states before the first position of each chunk, `state_next` the last ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scan {
    pub shape: ScanShape,
    pub carried: bool,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for Scan {
    fn stem(&self) -> &'static str {
        "scan"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let (shape, assign) = (&self.shape, Store::Assign.access());
        let out = [shape.rows(), shape.d_inner];
        let mut reads = shape.reads(self.math);
        let mut writes = vec![
            Operand::store("out", out, self.math.storage(), assign),
            Operand::store("starts", shape.starts(), DType::F32, assign),
        ];
        if self.carried {
            reads.push(Operand::read("state", shape.state(), DType::F32));
            reads.push(Operand::read("keep", [shape.batch], DType::U32));
            let state = shape.state();
            writes.push(Operand::store("state_next", state, DType::F32, assign));
        }
        Signature { reads, writes }
    }

    fn flops(&self) -> u64 {
        self.shape.flops(3)
    }

    fn is_restorable(&self) -> bool {
        true
    }

    fn backward(&self, call: &OpCall, grads: &mut GradBuilder) -> Result<(), PlanError> {
        let stem = self.stem();
        let [u, dt, bc, xz, a_log, skip, dt_bias] = call.reads[..7] else {
            return Err(PlanError::NoBackward {
                op: stem,
                tensor: grads.first_write_name(call),
            });
        };
        let mut reads = vec![grads.incoming(call.writes[0], stem)?];
        reads.extend(&call.reads[..7]);
        reads.push(call.writes[1]);
        let du = grads.own_activation_target(u, stem)?;
        let ddt = grads.assigned_activation_target(dt, stem)?;
        let dbc = grads.assigned_activation_target(bc, stem)?;
        let (dxz, _) = grads.activation_target(xz);
        let mut writes = vec![du, ddt, dbc, dxz];
        let trainable = grads.is_trainable(a_log);
        if trainable {
            for weight in [a_log, skip, dt_bias] {
                writes.push(grads.assigned_parameter_target(weight, stem)?);
            }
        }
        let waiting = grads.take_waiting(call.writes[0]);
        let op = ScanGrad {
            shape: self.shape,
            sum: grads.token_sum(self.shape.rows(), Some(self.shape.seq_len)),
            weight_grad: trainable,
            state_grad: false,
            restore: !waiting.is_empty(),
            math: self.math,
        };
        if !op.restore {
            grads.emit(op, reads, writes);
            return Ok(());
        }
        let out = grads.restored(call.writes[0]);
        writes.push(out);
        grads.emit(op, reads, writes);
        grads.emit_waiting(waiting, out);
        Ok(())
    }
}

/// The states of a chunk are computed again from its start. Then, positions in descending order, with
/// `g_n = +0.0` after the last one, `s = sigmoid(z)` and `before` the states before the position:
///
/// ```text
/// dy   = dout · (z · s);  dz = (dout · y) · (s · fma(z, 1 - s, 1))
/// g_n  = fma(C_n, dy, g_n);  p = Σ_n B_n · g_n
/// dB_n = g_n · (delta · u);  dC_n = dy · h_n
/// g_n  = g_n · decay(delta · rate_n)
/// e_n  = g_n · before_n;  q = Σ_n rate_n · e_n
/// du   = fma(skip, dy, p · delta);  ddt = fma(p, u, q · ln(2)) · sigmoid(dt + dt_bias)
/// ```
///
/// Sums over states are those of forward. `dB_n` and `dC_n` are added over ascending channels by the
/// balanced tree. The gradients of the weights are sums over tokens whose pieces are sequences, each one
/// chain over **descending** positions: `da_log_n` of `fma(e_n, delta, acc)`, whose end is multiplied by
/// `-exp(a_log_n)`, `dskip` of `fma(dy, u, acc)`, `ddt_bias` of `acc + ddt`. `dz` goes to the right half of the rows of `dxz`; the next call writes the left one.
/// `dstate` is what `g_n` ends with: the gradient of the state that the sequence began with. `out` takes the output of forward
/// once more, with its bits, where it is restored: then nothing keeps it between forward and backward.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScanGrad {
    pub shape: ScanShape,
    /// Pieces are whole sequences.
    pub sum: TokenSum,
    pub weight_grad: bool,
    pub state_grad: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub restore: bool,
    #[serde(default, skip_serializing_if = "Math::is_f32")]
    pub math: Math,
}

impl OpRule for ScanGrad {
    fn stem(&self) -> &'static str {
        "scan_grad"
    }

    fn math(&self) -> Math {
        self.math
    }

    fn signature(&self) -> Signature {
        let (shape, storage) = (&self.shape, self.math.storage());
        let (rows, d, n) = (shape.rows(), shape.d_inner, shape.d_state);
        let mut reads = vec![Operand::read("dout", [rows, d], storage)];
        reads.extend(shape.reads(self.math));
        reads.push(Operand::read("starts", shape.starts(), DType::F32));
        let assign = Store::Assign.access();
        let mut writes = vec![
            Operand::store("du", [rows, d], storage, assign),
            Operand::store("ddt", [rows, d], storage, assign),
            Operand::store("dbc", [rows, 2 * n], storage, assign),
            Operand::store("dxz", [rows, 2 * d], storage, Access::Partial),
        ];
        if self.weight_grad {
            writes.push(Operand::store("da_log", [d, n], DType::F32, assign));
            writes.push(Operand::store("dskip", [d], DType::F32, assign));
            writes.push(Operand::store("ddt_bias", [d], DType::F32, assign));
        }
        if self.state_grad {
            writes.push(Operand::store("dstate", shape.state(), DType::F32, assign));
        }
        if self.restore {
            writes.push(Operand::store("out", [rows, d], storage, assign));
        }
        Signature { reads, writes }
    }

    fn flops(&self) -> u64 {
        self.shape.flops(9)
    }
}
