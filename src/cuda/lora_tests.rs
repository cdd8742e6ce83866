//! Tests of the launches of adapters.

use super::*;
use crate::cuda::call::H200;
use crate::num::tree::TokenSum;
use crate::op::{Op, OpCall};

/// A call whose operands stand one after another, each at a multiple of 256 bytes.
fn placed(op: impl Into<Op>) -> PlacedCall {
    let op = op.into();
    let signature = op.rule().signature();
    let mut offset = 0;
    let mut place = |operand: &crate::op::Operand| {
        let bytes = operand.shape.elements() * operand.dtype.size();
        let region = Region { offset, bytes };
        offset = (offset + bytes).next_multiple_of(256);
        region
    };
    PlacedCall {
        reads: signature.reads.iter().map(&mut place).collect(),
        writes: signature.writes.iter().map(&mut place).collect(),
        call: OpCall {
            op,
            reads: Vec::new(),
            writes: Vec::new(),
        },
    }
}

fn adapters(rank: usize, columns: &[usize]) -> Adapters {
    let mut first = 0;
    let mut part = |&columns: &usize| {
        first += columns;
        Part {
            first: first - columns,
            columns,
        }
    };
    Adapters {
        rank,
        parts: columns.iter().map(&mut part).collect(),
        n_out: columns.iter().sum(),
        scale: 2.0,
    }
}

fn up_of(adapters: &Adapters) -> CallLaunches {
    let op = LoraUp {
        rows: 100,
        adapters: adapters.clone(),
        math: Math::Bf16,
    };
    up(&op, &placed(op.clone()), &H200)
}

#[test]
fn one_launch_serves_four_parts_and_a_fifth_has_its_own() {
    let made = up_of(&adapters(8, &[64, 128, 72, 8]));
    assert_eq!(made.launches.len(), 1);
    assert_eq!(made.launches[0].entry, "lora_up_bf16");
    assert_eq!(made.launches[0].grid[0], 2 * (1 + 2 + 2 + 1));
    let made = up_of(&adapters(8, &[64, 128, 72, 8, 40]));
    let [first, second] = &made.launches[..] else {
        panic!("{} launches", made.launches.len());
    };
    assert_eq!((first.grid[0], second.grid[0]), (12, 2));
    let offset = |launch: &KernelLaunch, i: usize| match launch.args[i] {
        Arg::Region(region) => region.offset,
        _ => panic!("operands come first"),
    };
    // Four ranks of 8, and 272 rows of b, 2 bytes each.
    assert_eq!(offset(second, 0) - offset(first, 0), 4 * 8 * 2);
    assert_eq!(offset(second, 1) - offset(first, 1), 272 * 8 * 2);
    assert_eq!(offset(second, 2), offset(first, 2));
}

#[test]
fn ranks_and_columns_that_fill_no_chunks_take_kernels_without_vectors() {
    for (rank, columns, entry) in [
        (8, 64, "lora_up_bf16"),
        (4, 64, "lora_up_bf16_any"),
        (8, 60, "lora_up_bf16_any"),
    ] {
        let made = up_of(&adapters(rank, &[columns]));
        assert_eq!(made.launches[0].entry, entry);
    }
}

#[test]
fn pieces_of_every_launch_meet_behind_the_same_counters() {
    let of = |columns: &[usize], piece| {
        let op = LoraUpGradWeight {
            adapters: adapters(16, columns),
            sum: TokenSum {
                tokens: 256,
                grain: 256,
                piece,
            },
            math: Math::Bf16,
        };
        up_grad_weight(&op, &placed(op.clone()), &H200)
    };
    let whole = of(&[64], 256);
    assert_eq!((whole.workspace_bytes, whole.zeroed_bytes), (0, 0));
    let made = of(&[64, 64, 64, 64, 8], 128);
    assert_eq!(made.launches.len(), 2);
    assert_eq!(made.launches[0].grid[0], 2 * 4);
    assert_eq!(made.zeroed_bytes, 256);
    assert_eq!(made.workspace_bytes, 256 + 4 * 2 * 64 * 32 * 4);
    for launch in &made.launches {
        assert_eq!(launch.args[3], Arg::Workspace { offset: 0 });
        assert_eq!(launch.args[4], Arg::Workspace { offset: 256 });
    }
}
