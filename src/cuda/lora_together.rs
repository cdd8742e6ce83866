//! The adapters of gate and up and SwiGLU behind them, which one launch serves in a graph: what is written of gate and
//! up need not be read again. A warp adds to the same columns of both, and rounds before it goes on.

use super::call::{Arg, DeviceShape, KernelLaunch};
use super::lora::STRIP_WARPS;
use super::rows::{by_vectors, number, numbers, regions};
use super::together::{Group, overlap};
use crate::layout::PlacedCall;
use crate::op::Op;
use crate::op::lora::Part;
use crate::shape::Math;

/// Rows of a strip, and its columns of gate and of up.
const ROWS: usize = 32;
const COLUMNS: usize = 32;

/// Adapters on gate and up, and SwiGLU of their sum.
pub fn gated(calls: &[PlacedCall], _: &DeviceShape) -> Option<Group> {
    let [first, second, ..] = calls else {
        return None;
    };
    let (Op::LoraUp(up), Op::SwiGlu(gate)) = (&first.call.op, &second.call.op) else {
        return None;
    };
    let entry = match up.math {
        Math::Bf16 => "lora_up_swiglu_bf16",
        Math::F16 => "lora_up_swiglu_f16",
        Math::F32 | Math::Tf32 => return None,
    };
    let (adapters, d) = (&up.adapters, gate.d_ff);
    let half = |first| Part { first, columns: d };
    let both = adapters.parts[..] == [half(0), half(d)] && adapters.n_out == 2 * d;
    let same = up.rows == gate.rows && up.math == gate.math && first.writes[0] == second.reads[0];
    let (s, b, y, a) = (
        first.reads[0],
        first.reads[1],
        first.writes[0],
        second.writes[0],
    );
    let apart = ![s, b, y].iter().any(|operand| overlap(&a, operand));
    let whole = by_vectors(adapters.rank, up.math, &[s, b]) && by_vectors(d, up.math, &[y, a]);
    let strips = up.rows.div_ceil(ROWS) * d.div_ceil(COLUMNS);
    if !(both && same && apart && whole && strips > 0) {
        return None;
    }
    let mut args = regions([s, b, y, a]).to_vec();
    args.extend(numbers([up.rows, d, adapters.rank]));
    args.push(Arg::F32(adapters.scale));
    let launch = KernelLaunch {
        entry,
        grid: [number(strips.div_ceil(STRIP_WARPS)), 1, 1],
        block: [number(STRIP_WARPS * 32), 1, 1],
        shared_bytes: 0,
        args,
    };
    Some(Group {
        calls: 2,
        launches: launch.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Region;
    use crate::op::OpCall;
    use crate::op::lora::{Adapters, LoraUp};
    use crate::op::swiglu::SwiGlu;

    const DEVICE: DeviceShape = DeviceShape {
        multiprocessors: 132,
        shared_bytes_per_block: 232_448,
        warpgroups: true,
    };

    fn placed(op: impl Into<Op>, reads: &[usize], write: usize) -> PlacedCall {
        let region = |at: &usize| Region {
            offset: at << 20,
            bytes: 1 << 20,
        };
        PlacedCall {
            reads: reads.iter().map(region).collect(),
            writes: vec![region(&write)],
            call: OpCall {
                op: op.into(),
                reads: Vec::new(),
                writes: Vec::new(),
            },
        }
    }

    /// Adapters on these parts of 2 x `d` columns, then SwiGLU from place 2 to place `a`.
    fn calls(math: Math, (rank, d): (usize, usize), parts: &[usize], a: usize) -> [PlacedCall; 2] {
        let part = |&first: &usize| Part { first, columns: d };
        let adapters = Adapters {
            rank,
            n_out: 2 * d,
            parts: parts.iter().map(part).collect(),
            scale: 2.0,
        };
        let rows = 100;
        let up = LoraUp {
            rows,
            adapters,
            math,
        };
        let gate = SwiGlu {
            rows,
            d_ff: d,
            math,
        };
        [placed(up, &[0, 1], 2), placed(gate, &[2], a)]
    }

    #[test]
    fn gate_and_up_with_their_adapters_are_one_launch() {
        for (math, entry) in [
            (Math::Bf16, "lora_up_swiglu_bf16"),
            (Math::F16, "lora_up_swiglu_f16"),
        ] {
            let group = gated(&calls(math, (16, 72), &[0, 72], 3), &DEVICE).expect("a group");
            let launch = &group.launches.launches[0];
            assert_eq!((group.calls, launch.entry), (2, entry));
            // Four strips of rows, three of columns, four a block.
            assert_eq!(launch.grid[0], 3);
        }
    }

    #[test]
    fn what_is_not_both_or_overlaps_is_served_apart() {
        let none = |calls: [PlacedCall; 2]| assert_eq!(gated(&calls, &DEVICE), None);
        none(calls(Math::Bf16, (16, 72), &[0], 3));
        none(calls(Math::Bf16, (16, 72), &[72], 3));
        none(calls(Math::F32, (16, 72), &[0, 72], 3));
        none(calls(Math::Bf16, (12, 72), &[0, 72], 3));
        none(calls(Math::Bf16, (16, 70), &[0, 70], 3));
        // SwiGLU's output in the place of an operand, and SwiGLU of something else.
        for a in [0, 1, 2] {
            none(calls(Math::Bf16, (16, 72), &[0, 72], a));
        }
        let mut other = calls(Math::Bf16, (16, 72), &[0, 72], 3);
        other[1].reads[0].offset = 9 << 20;
        none(other);
    }
}
