//! Two neighbouring calls that one launch serves in a graph: the gradients of a small linear layer's weight and
//! of its input, which both read `dy`.
//!
//! Each of them alone leaves most of a large device idle. The blocks of both stand in one grid, and a block
//! computes what it would compute alone, so no bit depends on it. Calls that were launched one by one, as
//! before capture, give the same.

use super::call::{Arg, DeviceShape, KernelLaunch};
use super::matmul_tensor::Paired;
use super::pieces::{Work, pieces, whole_args};
use super::rows::{by_vectors, regions};
use crate::layout::{PlacedCall, Region};
use crate::num::tensor_step::Kind;
use crate::op::Op;

/// Whether two regions share a byte.
fn overlap(a: &Region, b: &Region) -> bool {
    a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes
}

/// Whether the order of two calls does not matter: neither writes what the other reads or writes.
fn independent(first: &PlacedCall, second: &PlacedCall) -> bool {
    let touches = |a: &PlacedCall, b: &PlacedCall| {
        let others = || b.reads.iter().chain(&b.writes);
        a.writes.iter().any(|w| others().any(|o| overlap(w, o)))
    };
    !touches(first, second) && !touches(second, first)
}

/// The launch that serves both calls; `None` where each has launches of its own.
fn launch(weight: &PlacedCall, input: &PlacedCall, device: &DeviceShape) -> Option<KernelLaunch> {
    let (Op::MatmulGradWeight(op), Op::MatmulGradInput(other)) = (&weight.call.op, &input.call.op)
    else {
        return None;
    };
    let sizes = [op.n_in, op.n_out, op.sum.tokens] == [other.n_in, other.n_out, other.rows];
    let same = sizes && op.math == other.math && weight.reads[0] == input.reads[0];
    if !same || !independent(weight, input) {
        return None;
    }
    let vectors = |width, region| by_vectors(width, op.math, &[region]);
    let [dy, x] = [weight.reads[0], weight.reads[1]];
    let [_, pieces] = pieces(&op.sum);
    let work = |m, n, pieces, vectors| Work {
        m,
        n,
        pieces,
        vectors,
    };
    let dy_vectors = vectors(op.n_out, dy);
    let of_weight = work(op.n_out, op.n_in, pieces, dy_vectors && vectors(op.n_in, x));
    let of_input = vectors(op.n_in, input.reads[1]) && vectors(op.n_in, input.writes[0]);
    let of_input = work(other.rows, op.n_in, 1, dy_vectors && of_input);
    let paired = Paired::of(Kind::of(op.math)?, (&of_weight, &of_input), &op.sum, device)?;
    let mut args = whole_args(op, weight);
    args.extend(regions([input.reads[1], input.writes[0]]));
    args.push(Arg::U32(paired.weight_blocks));
    Some(paired.launch(args))
}

/// For each call the launch that serves it and the next one together, where there is one. A call is in one
/// pair at most.
pub fn launches(calls: &[PlacedCall], device: &DeviceShape) -> Vec<Option<KernelLaunch>> {
    let next = calls.iter().skip(1).map(Some).chain([None]);
    let both = calls.iter().zip(next);
    both.map(|(call, next)| launch(call, next?, device))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::num::tree::TokenSum;
    use crate::op::matmul::{MatmulGradInput, MatmulGradWeight};
    use crate::op::{OpCall, Store};
    use crate::shape::Math;

    const H200: DeviceShape = DeviceShape {
        multiprocessors: 132,
        shared_bytes_per_block: 232_448,
    };

    /// A call over regions of 1 MiB each, which start at these multiples of it.
    fn placed(op: impl Into<Op>, reads: [usize; 2], write: usize) -> PlacedCall {
        let region = |at: usize| Region {
            offset: at << 20,
            bytes: 1 << 20,
        };
        PlacedCall {
            reads: reads.map(region).to_vec(),
            writes: vec![region(write)],
            call: OpCall {
                op: op.into(),
                reads: Vec::new(),
                writes: Vec::new(),
            },
        }
    }

    /// Both gradients of a layer over 1,024 tokens, in `math`; dy, x and weight are 0, 1 and 2.
    fn layer(math: Math, [n_in, n_out]: [usize; 2], [dweight, dx]: [usize; 2]) -> [PlacedCall; 2] {
        let sum = TokenSum {
            tokens: 1024,
            grain: 1024,
            piece: 128,
        };
        let weight = MatmulGradWeight {
            math,
            n_in,
            n_out,
            sum,
            store: Store::Assign,
        };
        let input = MatmulGradInput {
            math,
            rows: 1024,
            n_in,
            n_out,
        };
        [placed(weight, [0, 1], dweight), placed(input, [0, 2], dx)]
    }

    fn of(calls: &[PlacedCall; 2]) -> Option<KernelLaunch> {
        launch(&calls[0], &calls[1], &H200)
    }

    #[test]
    fn small_layers_are_served_together_and_large_ones_apart() {
        let made = |math, sizes| of(&layer(math, sizes, [3, 4])).map(|l| (l.entry, l.grid[0]));
        let bf16 = |sizes| made(Math::Bf16, sizes);
        assert_eq!(
            bf16([128, 768]),
            Some(("matmul_grads_bf16_32x32", 96 + 128))
        );
        assert_eq!(bf16([384, 128]), Some(("matmul_grads_bf16_64x64", 48 + 96)));
        assert_eq!(
            made(Math::Tf32, [128, 128]),
            Some(("matmul_grads_tf32_32x32", 16 + 128))
        );
        assert_eq!(bf16([768, 2048]), None);
        assert_eq!(made(Math::F32, [128, 768]), None);
        // No access of 16 bytes reaches every row.
        assert_eq!(bf16([132, 128]), None);
    }

    #[test]
    fn calls_that_need_each_others_order_are_served_apart() {
        let sizes = [128, 128];
        assert!(of(&layer(Math::Bf16, sizes, [3, 4])).is_some());
        // dx in the place of x, of dy and of dweight.
        for [dweight, dx] in [[3, 1], [3, 0], [3, 3], [2, 4]] {
            assert!(
                of(&layer(Math::Bf16, sizes, [dweight, dx])).is_none(),
                "{dweight} {dx}"
            );
        }
        let [weight, mut input] = layer(Math::Bf16, sizes, [3, 4]);
        input.reads[0].offset = 5 << 20;
        assert!(of(&[weight, input]).is_none());
    }

    #[test]
    fn a_pair_stands_at_its_first_call_and_in_this_order_alone() {
        let [weight, input] = layer(Math::Bf16, [128, 128], [3, 4]);
        let calls = [input.clone(), weight, input];
        let found = launches(&calls, &H200);
        let places: Vec<bool> = found.iter().map(Option::is_some).collect();
        assert_eq!(places, [false, true, false]);
    }
}
