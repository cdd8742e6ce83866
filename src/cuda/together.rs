//! Neighbouring calls that one launch serves in a graph: where each of them alone would leave most of a large
//! device idle, or is over sooner than the next one starts.
//!
//! - The gradients of a small linear layer's weight and of its input, which both read `dy`.
//! - Attention and its gradients, and what stands beside them (`attention_together.rs`).
//! - A large product and the sums of adapters behind it (`matmul_together.rs`).
//! - The adapters of gate and up, and SwiGLU (`lora_together.rs`).
//! - The loss, the squares of few gradients, and the decision on the step, by the last block to arrive.
//!
//! A block computes what it would compute alone, so no bit depends on it. Calls that are launched one by one, as before capture, give the same.

use super::attention_together;
use super::call::{Arg, CallLaunches, DeviceShape, KernelLaunch};
use super::clip::shared_doubles;
use super::cross_entropy::{loss_cut, loss_places};
use super::lora_together;
use super::matmul::{input_work, weight_work};
use super::matmul_pair::Pair;
use super::matmul_tensor::Paired;
use super::matmul_together;
use super::pieces::whole_args;
use super::rows::{by_vectors, number, numbers, regions};
use super::tree_add::words;
use crate::layout::PlacedCall;
use crate::num::tensor_step::Kind;
use crate::op::Op;

/// Neighbouring calls and what serves all of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// How many calls, from the first on.
    pub calls: usize,
    pub launches: CallLaunches,
}

impl Group {
    /// The group as the manifest's execution section lists it at each of its calls, of which `first` is the
    /// first one's index.
    pub fn describe(&self, first: usize) -> String {
        let last = first + self.calls - 1;
        format!("{} for calls {first} to {last}", self.launches.describe())
    }
}

/// Whether the order of two calls does not matter: neither writes what the other reads or writes.
pub(super) fn independent(first: &PlacedCall, second: &PlacedCall) -> bool {
    let touches = |a: &PlacedCall, b: &PlacedCall| {
        let others = || b.reads.iter().chain(&b.writes);
        a.writes.iter().any(|w| others().any(|o| w.overlaps(o)))
    };
    !touches(first, second) && !touches(second, first)
}

/// Both gradients of a small layer.
fn layer_gradients(calls: &[PlacedCall], device: &DeviceShape) -> Option<Group> {
    let [weight, input, ..] = calls else {
        return None;
    };
    let (Op::MatmulGradWeight(op), Op::MatmulGradInput(other)) = (&weight.call.op, &input.call.op)
    else {
        return None;
    };
    let sizes = [op.n_in, op.n_out, op.sum.tokens] == [other.n_in, other.n_out, other.rows];
    let same = sizes && op.math == other.math && weight.reads[0] == input.reads[0];
    if !same || !independent(weight, input) {
        return None;
    }
    let of_weight = weight_work(op, weight);
    let mut of_input = input_work(other, input);
    of_input.vectors &= by_vectors(op.n_in, op.math, &[input.writes[0]]);
    let works = (&of_weight, &of_input);
    let of_input = [input.reads[1], input.writes[0]];
    let launches = match Kind::of(op.math) {
        Some(kind) => {
            let paired = Paired::of(kind, works, &op.sum, device)?;
            let mut args = whole_args(op, weight);
            args.extend(regions(of_input));
            args.push(Arg::U32(paired.weight_blocks));
            paired.launch(args).into()
        }
        None => Pair::of(works, &op.sum, device)?.launches((op, weight), of_input),
    };
    Some(Group { calls: 2, launches })
}

/// The most partial sums of squares that a block of this few threads folds, and the most leaves of a loss.
const MOST_PARTIALS: usize = 1024;
const MOST_PLACES: usize = 1024;
/// Threads of a block, one a lane of a sum of squares.
const STEP_END_THREADS: u32 = 256;

/// The loss, the squares and the decision.
fn step_end(calls: &[PlacedCall]) -> Option<Group> {
    let [first, second, third, ..] = calls else {
        return None;
    };
    let (Op::LossSum(loss), Op::GradSquares(squares), Op::Clip(clip)) =
        (&first.call.op, &second.call.op, &third.call.op)
    else {
        return None;
    };
    let (total, partials, scalars) = (first.writes[0], second.writes[0], first.reads[1]);
    let chained = third.reads[..] == [partials, total, scalars];
    let places = loss_places(&loss.sum);
    let small = clip.partials <= MOST_PARTIALS && places <= MOST_PLACES;
    let plain = clip.loss_scaling.is_none() && clip.partials == squares.partials();
    if !(chained && small && plain && independent(first, second)) {
        return None;
    }
    let mut args = regions([first.reads[0], scalars, total]).to_vec();
    args.extend(numbers(loss_cut(&loss.sum)));
    args.extend(regions([second.reads[0], partials]));
    args.extend(words(squares.elements));
    args.push(Arg::Region(third.writes[0]));
    args.extend(numbers([clip.partials]));
    args.push(Arg::Workspace { offset: 0 });
    let doubles = shared_doubles(clip.partials).max(places.div_ceil(2));
    let launch = KernelLaunch {
        entry: "step_end_f32",
        grid: [number(1 + clip.partials), 1, 1],
        block: [STEP_END_THREADS, 1, 1],
        shared_bytes: number(doubles * size_of::<f64>()),
        args,
    };
    // One counter of arrivals.
    let counter = size_of::<u32>();
    Some(Group {
        calls: 3,
        launches: CallLaunches {
            zeroed_bytes: counter,
            workspace_bytes: counter,
            ..launch.into()
        },
    })
}

/// For each call the group that begins with it, where there is one. A call is in one group at most.
pub fn groups(calls: &[PlacedCall], device: &DeviceShape) -> Vec<Option<Group>> {
    let from = |first| {
        let calls = &calls[first..];
        layer_gradients(calls, device)
            .or_else(|| attention_together::turned(calls, device))
            .or_else(|| attention_together::gradients(calls, device))
            .or_else(|| matmul_together::forward(calls, device))
            .or_else(|| matmul_together::backward(calls, device))
            .or_else(|| lora_together::gated(calls, device))
            .or_else(|| step_end(calls))
    };
    (0..calls.len()).map(from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::call::H200;
    use crate::cuda::placed_calls::placed;
    use crate::num::tree::TokenSum;
    use crate::op::Store;
    use crate::op::clip::{Clip, GradSquares, LossScaling};
    use crate::op::cross_entropy::LossSum;
    use crate::op::matmul::{MatmulGradInput, MatmulGradWeight};
    use crate::shape::Math;

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
        [placed(weight, &[0, 1], dweight), placed(input, &[0, 2], dx)]
    }

    fn of(calls: &[PlacedCall]) -> Option<KernelLaunch> {
        let group = layer_gradients(calls, &H200)?;
        assert_eq!((group.calls, group.launches.launches.len()), (2, 1));
        group.launches.launches.into_iter().next()
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
        // No access of 16 bytes reaches every row.
        assert_eq!(bf16([132, 128]), None);
    }

    #[test]
    fn small_layers_in_f32_take_the_tiles_that_are_done_first_together() {
        let made = |sizes| of(&layer(Math::F32, sizes, [3, 4])).map(|l| (l.entry, l.grid[0]));
        // The input's blocks, then eight pieces of the weight's.
        let expected = [
            ([128, 768], "matmul_grads_f32_32x32_64x32", 128 + 8 * 48),
            ([256, 128], "matmul_grads_f32_64x32_64x32", 128 + 8 * 16),
            ([8, 256], "matmul_grads_f32_32x32_32x32", 32 + 8 * 8),
            ([132, 128], "matmul_grads_f32_64x32_64x32", 80 + 8 * 10),
        ];
        for (sizes, entry, blocks) in expected {
            assert_eq!(made(sizes), Some((entry, blocks)), "{sizes:?}");
        }
        assert_eq!(made([768, 2048]), None);
        assert_eq!(made([130, 128]), None);
    }

    #[test]
    fn a_pair_in_f32_leaves_pieces_and_counts_them_in() {
        let calls = layer(Math::F32, [128, 256], [3, 4]);
        let group = layer_gradients(&calls, &H200).expect("a group");
        let tiles = 8 * 4 * 2;
        let partials = 8 * 256 * 128 * 4;
        let counters = (4 * tiles / 2_usize).next_multiple_of(256);
        assert_eq!(group.launches.zeroed_bytes, counters);
        assert_eq!(group.launches.workspace_bytes, counters + partials);
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
    fn a_group_stands_at_its_first_call_and_in_this_order_alone() {
        let [weight, input] = layer(Math::Bf16, [128, 128], [3, 4]);
        let calls = [input.clone(), weight, input];
        let found = groups(&calls, &H200);
        let places: Vec<bool> = found.iter().map(Option::is_some).collect();
        assert_eq!(places, [false, true, false]);
    }

    /// Loss, squares and decision over so many gradients; each call's operands one behind the other.
    fn end_of_step(elements: usize, loss_scaling: Option<LossScaling>) -> [PlacedCall; 3] {
        let sum = TokenSum {
            tokens: 1024,
            grain: 1024,
            piece: 32,
        };
        let squares = GradSquares { elements };
        let clip = Clip {
            partials: squares.partials(),
            loss_scaling,
        };
        [
            placed(LossSum { sum }, &[0, 1], 2),
            placed(squares, &[3, 3], 4),
            placed(clip, &[4, 2, 1], 5),
        ]
    }

    #[test]
    fn the_end_of_a_small_step_is_one_launch_with_a_counter() {
        let group = step_end(&end_of_step(459_392, None)).expect("a group");
        let launch = &group.launches.launches[0];
        assert_eq!((group.calls, launch.entry), (3, "step_end_f32"));
        assert_eq!((launch.grid, launch.shared_bytes), ([30, 1, 1], 128));
        assert_eq!(
            (group.launches.zeroed_bytes, group.launches.workspace_bytes),
            (4, 4)
        );
        // Many partials, a loss scale, and a decision on another loss.
        assert_eq!(step_end(&end_of_step(1 << 28, None)), None);
        let scaling = LossScaling {
            growth_interval: 2000,
        };
        assert_eq!(step_end(&end_of_step(459_392, Some(scaling))), None);
        let mut other = end_of_step(459_392, None);
        other[2].reads[1].offset = 9 << 20;
        assert_eq!(step_end(&other), None);
    }
}
