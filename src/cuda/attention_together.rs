//! The neighbours of attention and of its gradients, which their kernels serve as well in a graph.
//!
//! - The dot products of the output with its gradient: the query pass, which reads both rows, computes them and
//!   leaves them to the key and value pass.
//! - The rotation back of the gradients of queries and keys, in registers: a lane has both columns of a pair. What it
//!   turns is rounded before as the pass stores it alone.
//! - Where the gradients of the scores find a place in the workspace, the key and value pass leaves them there for the
//!   query pass (`attention_kept.rs`). The dot products are computed before both.
//! - Where a sequence has no more rows than a tile, a block rotates queries and keys before it attends to them.
//! - Both passes stand in one grid where a sequence has no more rows than a tile. Each computes the dot products.
//!
//! The order of all sums is that of the calls alone, so no bit depends on it.

use super::attention::{delta, forward, grad_key_value, grad_query};
use super::attention_kept;
use super::attention_tensor::ALIGNMENT;
use super::call::{Arg, CallLaunches, DeviceShape, KernelLaunch};
use super::rows::number;
use super::together::Group;
use crate::layout::{PlacedCall, Region};
use crate::op::Op;
use crate::op::attention::{AttentionShape, KEY_TILE};
use crate::op::rope::Heads;

/// Operands of a pass, before its sizes.
const OPERANDS: usize = 5;
/// Query heads of a key head whose statistics a block holds at most.
const MOST_HEADS: usize = 8;

/// A pass alone, and what serves its neighbours with it.
type Fused = (&'static str, &'static str);

/// The kernels of a pass in all forms, each with the one whose name ends so.
macro_rules! in_all_forms {
    ($pass:literal, $end:literal) => {
        in_all_forms!($pass, $end, "bf16_d32", "bf16_d64", "bf16_d128", "f16_d32", "f16_d64",
            "f16_d128", "tf32_d32", "tf32_d64", "tf32_d128", "bf16_sm90a_d64", "bf16_sm90a_d128",
            "f16_sm90a_d64", "f16_sm90a_d128")
    };
    ($pass:literal, $end:literal, $($form:literal),*) => {
        [$((concat!($pass, $form), concat!($pass, $form, $end))),*]
    };
}

/// The kernels of the query pass that compute the dot products and rotate.
const QUERY: [Fused; 13] = in_all_forms!("attention_grad_query_", "_with_delta");

/// Those of the key and value pass that rotate.
const KEY_VALUE: [Fused; 13] = in_all_forms!("attention_grad_key_value_", "_turned");

/// Those of both passes at once, by the query pass's.
const BOTH: [Fused; 8] = [
    ("attention_grad_query_bf16_d32", "attention_grads_bf16_d32"),
    ("attention_grad_query_bf16_d64", "attention_grads_bf16_d64"),
    (
        "attention_grad_query_bf16_d128",
        "attention_grads_bf16_d128",
    ),
    ("attention_grad_query_f16_d32", "attention_grads_f16_d32"),
    ("attention_grad_query_f16_d64", "attention_grads_f16_d64"),
    ("attention_grad_query_f16_d128", "attention_grads_f16_d128"),
    ("attention_grad_query_tf32_d32", "attention_grads_tf32_d32"),
    ("attention_grad_query_tf32_d64", "attention_grads_tf32_d64"),
];

/// Those of the rotation and the forward pass at once, by the forward pass's.
const TURNED: [Fused; 8] = [
    ("attention_bf16_d32", "attention_turned_bf16_d32"),
    ("attention_bf16_d64_small", "attention_turned_bf16_d64"),
    ("attention_bf16_d128_small", "attention_turned_bf16_d128"),
    ("attention_f16_d32", "attention_turned_f16_d32"),
    ("attention_f16_d64_small", "attention_turned_f16_d64"),
    ("attention_f16_d128_small", "attention_turned_f16_d128"),
    ("attention_tf32_d32", "attention_turned_tf32_d32"),
    ("attention_tf32_d64_small", "attention_turned_tf32_d64"),
];
/// Queries of a warp.
const WARP_QUERIES: usize = 16;

fn fused(of: &[Fused], entry: &str) -> Option<&'static str> {
    of.iter().find(|pair| pair.0 == entry).map(|pair| pair.1)
}

/// Whether no two of these regions share a byte with `written`.
fn apart(written: Region, others: &[Region]) -> bool {
    !others.iter().any(|other| other.overlaps(&written))
}

/// Whether a rotation of these rows, positions and heads is one of all rows that attention has.
fn turns((rows, seq_len, heads): (usize, usize, Heads), shape: &AttentionShape) -> bool {
    (rows, seq_len, heads) == (shape.rows(), shape.seq_len, shape.heads)
}

/// The calls' operands, where they follow from one another as a layer's backward has them, and where nothing that is
/// written lies over anything that is read.
struct Chain {
    shape: AttentionShape,
    o: Region,
    delta: Region,
    /// The rotation's table, where a rotation follows.
    table: Option<Region>,
}

impl Chain {
    fn of(calls: &[PlacedCall]) -> Option<Chain> {
        let [first, query, key_value, ..] = calls else {
            return None;
        };
        let (
            Op::AttentionDelta(op),
            Op::AttentionGradQuery(second),
            Op::AttentionGradKeyValue(third),
        ) = (&first.call.op, &query.call.op, &key_value.call.op)
        else {
            return None;
        };
        let same = |shape, math| shape == op.shape && math == op.math;
        let (dout, o, delta) = (first.reads[0], first.reads[1], first.writes[0]);
        let [qkv, _, lse, _] = query.reads[..] else {
            return None;
        };
        let dqkv = query.writes[0];
        let chained = query.reads[..] == [qkv, dout, lse, delta]
            && key_value.reads == query.reads
            && key_value.writes == query.writes;
        let table = calls.get(3).and_then(|turn| match &turn.call.op {
            Op::RopeGrad(turning) => {
                let sizes = (turning.rows, turning.seq_len, turning.heads);
                let chained = turn.writes[..] == [dqkv] && turns(sizes, &op.shape);
                (chained && turning.math == op.math).then_some(turn.reads[0])
            }
            _ => None,
        });
        let read = [qkv, dout, lse, o];
        let mut free = apart(dqkv, &read) && apart(delta, &read) && apart(delta, &[dqkv]);
        free &= table.is_none_or(|table| apart(dqkv, &[table]) && apart(delta, &[table]));
        let whole = table
            .iter()
            .chain([&o])
            .all(|r| r.offset.is_multiple_of(16));
        let joined = same(second.shape, second.math) && same(third.shape, third.math);
        (chained && joined && free && whole).then_some(Chain {
            shape: op.shape,
            o,
            delta,
            table,
        })
    }

    fn calls(&self) -> usize {
        3 + usize::from(self.table.is_some())
    }

    /// The arguments of a query pass that serves its neighbours.
    fn query_args(&self, alone: &[Arg]) -> Option<Vec<Arg>> {
        let ([qkv, dout, lse, delta, dqkv], sizes) = alone.split_first_chunk::<OPERANDS>()?;
        // Where nothing is turned the kernel reads no table.
        let table = self.table.unwrap_or(self.delta);
        let mut args = vec![*qkv, *dout, *lse, Arg::Region(self.o), *delta, *dqkv];
        args.extend([
            Arg::Region(table),
            Arg::U32(u32::from(self.table.is_some())),
        ]);
        args.extend(sizes);
        Some(args)
    }

    /// The key and value pass, which rotates where a rotation follows.
    fn key_value(&self, mut alone: KernelLaunch) -> Option<KernelLaunch> {
        if let Some(table) = self.table {
            alone.entry = fused(&KEY_VALUE, alone.entry)?;
            alone.args.insert(OPERANDS, Arg::Region(table));
        }
        Some(alone)
    }

    /// Both passes in one grid.
    fn both(
        &self,
        (query, key_value): (&KernelLaunch, &KernelLaunch),
        device: &DeviceShape,
    ) -> Option<KernelLaunch> {
        let heads = self.shape.heads.group();
        let entry = fused(&BOTH, query.entry)?;
        let statistics = number(heads * 2 * KEY_TILE * size_of::<f32>());
        let shared_bytes = query.shared_bytes.max(key_value.shared_bytes + statistics);
        let mut args = self.query_args(&query.args)?;
        args.push(Arg::U32(query.grid[0]));
        let one = self.shape.seq_len <= KEY_TILE && query.block == key_value.block;
        let fits = heads <= MOST_HEADS && shared_bytes <= device.shared_bytes_per_block;
        (one && fits).then(|| KernelLaunch {
            entry,
            grid: [query.grid[0] + key_value.grid[0], 1, 1],
            block: query.block,
            shared_bytes,
            args,
        })
    }
}

/// The dot products, both passes, and the rotation where one follows.
pub(super) fn gradients(calls: &[PlacedCall], device: &DeviceShape) -> Option<Group> {
    let chain = Chain::of(calls)?;
    let (
        Op::AttentionDelta(dots),
        Op::AttentionGradQuery(query),
        Op::AttentionGradKeyValue(key_value),
    ) = (&calls[0].call.op, &calls[1].call.op, &calls[2].call.op)
    else {
        return None;
    };
    let query = grad_query(query, &calls[1], device);
    let key_value = grad_key_value(key_value, &calls[2], device);
    let ([query], [key_value]) = (&query.launches[..], &key_value.launches[..]) else {
        return None;
    };
    if let Some((passes, workspace_bytes)) =
        attention_kept::launches(&chain.shape, key_value, chain.table)
    {
        let mut launches = delta(dots, &calls[0], device).launches;
        launches.extend(passes);
        return Some(Group {
            calls: chain.calls(),
            launches: CallLaunches {
                launches,
                workspace_bytes,
                ..CallLaunches::default()
            },
        });
    }
    let launches = match chain.both((query, key_value), device) {
        Some(both) => vec![both],
        None => {
            let query = KernelLaunch {
                entry: fused(&QUERY, query.entry)?,
                args: chain.query_args(&query.args)?,
                ..query.clone()
            };
            vec![query, chain.key_value(key_value.clone())?]
        }
    };
    Some(Group {
        calls: chain.calls(),
        launches: CallLaunches {
            launches,
            ..CallLaunches::default()
        },
    })
}

/// The rotation in place and the forward pass over what it has rotated, where a block has all heads that read its
/// keys.
pub(super) fn turned(calls: &[PlacedCall], device: &DeviceShape) -> Option<Group> {
    let [turn, attend, ..] = calls else {
        return None;
    };
    let (Op::Rope(turning), Op::Attention(op)) = (&turn.call.op, &attend.call.op) else {
        return None;
    };
    let (table, qkv) = (turn.reads[0], turn.writes[0]);
    let sizes = (turning.rows, turning.seq_len, turning.heads);
    let chained = attend.reads[..] == [qkv] && turning.math == op.math && turns(sizes, &op.shape);
    let written = [qkv, attend.writes[0], attend.writes[1]];
    let free = written.iter().all(|&region| apart(region, &[table]))
        && apart(qkv, &written[1..])
        && apart(written[1], &written[2..]);
    let heads = op.shape.heads.group();
    let queries = heads * op.shape.seq_len.next_multiple_of(WARP_QUERIES);
    if !(chained && free && queries <= KEY_TILE && table.offset.is_multiple_of(16)) {
        return None;
    }
    let alone = forward(op, attend, device);
    let [alone] = &alone.launches[..] else {
        return None;
    };
    let entry = fused(&TURNED, alone.entry)?;
    let row = op.shape.heads.head_dim * op.math.storage().size();
    let shared_bytes = number(3 * KEY_TILE * row + ALIGNMENT);
    let sequences = op.shape.batch * op.shape.heads.n_kv_heads;
    let mut args = vec![Arg::Region(table)];
    args.extend(&alone.args);
    let launch = KernelLaunch {
        entry,
        grid: [number(sequences), 1, 1],
        block: alone.block,
        shared_bytes,
        args,
    };
    (shared_bytes <= device.shared_bytes_per_block).then(|| Group {
        calls: 2,
        launches: launch.into(),
    })
}

#[cfg(test)]
#[path = "attention_together_tests.rs"]
mod tests;
