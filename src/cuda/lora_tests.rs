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
fn whole_strips_are_gone_down_and_others_are_tiled() {
    let entry = |rows, rank, columns: &[usize], math| {
        let op = LoraUp {
            rows,
            adapters: adapters(rank, columns),
            math,
        };
        up(&op, &placed(op.clone()), &H200).launches[0].entry
    };
    let bf16 = |rows, rank, columns| entry(rows, rank, columns, Math::Bf16);
    assert_eq!(bf16(192, 16, &[512]), "lora_up_bf16_wide_16");
    assert_eq!(bf16(192, 8, &[64, 128, 64]), "lora_up_bf16_wide_16");
    assert_eq!(bf16(192, 24, &[512]), "lora_up_bf16_wide_32");
    assert_eq!(bf16(192, 48, &[512]), "lora_up_bf16_wide_48");
    assert_eq!(entry(192, 16, &[512], Math::F16), "lora_up_f16_wide_16");
    // Rows and columns that are no whole stage or strip, long and odd chains, and other precisions.
    assert_eq!(bf16(200, 16, &[512]), "lora_up_bf16");
    assert_eq!(bf16(192, 16, &[64, 72]), "lora_up_bf16");
    assert_eq!(bf16(192, 56, &[512]), "lora_up_bf16");
    assert_eq!(bf16(192, 12, &[512]), "lora_up_bf16_any");
    assert_eq!(entry(192, 16, &[512], Math::Tf32), "lora_up_tf32");
}

#[test]
fn a_strip_reads_its_ranks_by_16_bytes() {
    let entry = |[rows, n_in, ranks]: [usize; 3], offset: usize| {
        let op = LoraDownGradInput {
            rows,
            n_in,
            ranks,
            store: crate::op::Store::Add,
            math: Math::Bf16,
        };
        let mut call = placed(op.clone());
        call.reads[0].offset += offset;
        down_grad_input(&op, &call, &H200).launches[0].entry
    };
    let wide = |sizes| entry(sizes, 0);
    assert_eq!(wide([192, 512, 16]), "lora_down_grad_input_bf16_wide_16");
    assert_eq!(wide([192, 512, 48]), "lora_down_grad_input_bf16_wide_48");
    assert_eq!(wide([192, 520, 48]), "lora_down_grad_input_bf16");
    assert_eq!(wide([192, 512, 64]), "lora_down_grad_input_bf16");
    assert_eq!(entry([192, 512, 16], 8), "lora_down_grad_input_bf16_any");
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
