//! The adapters of a gate and an up projection, and SwiGLU behind them, in one launch of a graph: what the adapters leave is
//! gated before it leaves the registers, and read once.
//!
//! Every sum, rounding and sigmoid is that of the calls alone, so no bit depends on it.

use super::call::{Arg, DeviceShape};
use super::lora_wide::{self, Walk};
use super::rows::numbers;
use super::together::Group;
use crate::layout::PlacedCall;
use crate::op::Op;
use crate::op::lora::{LoraUp, Part};
use crate::op::swiglu::SwiGlu;

/// Whether the adapters stand on all columns of the gate and of the other projection, and on nothing else.
fn on_both(up: &LoraUp, swiglu: &SwiGlu) -> bool {
    let columns = swiglu.d_ff;
    let halves = [0, columns].map(|first| Part { first, columns });
    let same = up.rows == swiglu.rows && up.math == swiglu.math;
    same && up.adapters.n_out == 2 * columns && up.adapters.parts == halves
}

/// Adapters and the SwiGLU that reads what they have added to.
pub(super) fn gated(calls: &[PlacedCall], device: &DeviceShape) -> Option<Group> {
    let [first, second, ..] = calls else {
        return None;
    };
    let (Op::LoraUp(up), Op::SwiGlu(swiglu)) = (&first.call.op, &second.call.op) else {
        return None;
    };
    let ([s, b], [y]) = (&first.reads[..], &first.writes[..]) else {
        return None;
    };
    let ([gate_up], [a]) = (&second.reads[..], &second.writes[..]) else {
        return None;
    };
    let free = ![s, b, y].iter().any(|read| read.overlaps(a));
    if gate_up != y || !free || !on_both(up, swiglu) {
        return None;
    }
    let (rank, columns) = (up.adapters.rank, swiglu.d_ff);
    let operands = [*s, *b, *y, *a];
    let walk = Walk::of((up.rows, rank, up.math), &[columns], &operands, device)?;
    let more = numbers([columns, rank]).into_iter();
    let more = more.chain([Arg::F32(up.adapters.scale)]);
    let launch = walk.launch(lora_wide::up_swiglu_entry(up.math, rank)?, &operands, more)?;
    Some(Group {
        calls: 2,
        launches: launch.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::call::H200;
    use crate::cuda::placed_calls::{parts, placed};
    use crate::op::lora::Adapters;
    use crate::shape::Math;

    /// Adapters of a rank on these columns of a product for `d_ff`, and SwiGLU; s, b, y and a are 0 to 3.
    fn layer(math: Math, rank: usize, columns: &[usize], d_ff: usize) -> [PlacedCall; 2] {
        let up = LoraUp {
            rows: 192,
            adapters: Adapters {
                rank,
                n_out: 2 * d_ff,
                parts: parts(columns),
                scale: 2.0,
            },
            math,
        };
        let swiglu = SwiGlu {
            rows: 192,
            d_ff,
            math,
        };
        [placed(up, &[0, 1], 2), placed(swiglu, &[2], 3)]
    }

    #[test]
    fn adapters_on_gate_and_up_are_gated_in_their_launch() {
        let made = |calls: &[PlacedCall]| {
            let group = gated(calls, &H200)?;
            let launch = &group.launches.launches[0];
            Some((group.calls, launch.entry, launch.grid[0]))
        };
        let of = |math, rank, columns: &[usize], d_ff| made(&layer(math, rank, columns, d_ff));
        let found = of(Math::Bf16, 16, &[512, 512], 512);
        assert_eq!(found, Some((2, "lora_up_swiglu_bf16", 6 * 2)));
        let found = of(Math::F16, 8, &[64, 64], 64);
        assert_eq!(found, Some((2, "lora_up_swiglu_f16", 6)));
        // More than one step of terms, another precision, one adapter alone, one for both, and strips that are not whole.
        assert_eq!(of(Math::Bf16, 24, &[512, 512], 512), None);
        assert_eq!(of(Math::Tf32, 16, &[512, 512], 512), None);
        assert_eq!(of(Math::Bf16, 16, &[512], 512), None);
        assert_eq!(of(Math::Bf16, 16, &[1024], 512), None);
        assert_eq!(of(Math::Bf16, 16, &[72, 72], 72), None);
    }

    #[test]
    fn swiglu_of_something_else_or_over_an_operand_stands_alone() {
        let calls = || layer(Math::Bf16, 16, &[512, 512], 512);
        assert!(gated(&calls(), &H200).is_some());
        for (read, write) in [(4, 3), (2, 0), (2, 1), (2, 2)] {
            let mut calls = calls();
            calls[1].reads[0].offset = read << 20;
            calls[1].writes[0].offset = write << 20;
            assert_eq!(gated(&calls, &H200), None, "{read} {write}");
        }
        let mut calls = calls();
        calls.reverse();
        assert_eq!(gated(&calls, &H200), None);
    }
}
