//! Tests of what attention's gradients serve together: only where it may be.

use super::*;
use crate::cuda::call::H200;
use crate::cuda::placed_calls::{placed, region, shape};
use crate::op::attention::{Attention, AttentionDelta, AttentionGradKeyValue, AttentionGradQuery};
use crate::op::rope::{Rope, RopeGrad};
use crate::shape::Math;

/// The calls of a layer's backward; qkv, dout, lse, delta, o, table and dqkv are 0 to 6.
fn backward(shape: AttentionShape, math: Math) -> [PlacedCall; 4] {
    let turn = RopeGrad {
        rows: shape.rows(),
        seq_len: shape.seq_len,
        heads: shape.heads,
        math,
    };
    [
        placed(AttentionDelta { shape, math }, &[1, 4], 3),
        placed(AttentionGradQuery { shape, math }, &[0, 1, 2, 3], 6),
        placed(AttentionGradKeyValue { shape, math }, &[0, 1, 2, 3], 6),
        placed(turn, &[5], 6),
    ]
}

fn made(calls: &[PlacedCall]) -> Option<(usize, Vec<&'static str>)> {
    let group = gradients(calls, &H200)?;
    let entries = group.launches.launches.iter().map(|launch| launch.entry);
    Some((group.calls, entries.collect()))
}

#[test]
fn four_calls_are_two_launches_and_one_where_a_tile_has_the_sequence() {
    let of = |shape, math| made(&backward(shape, math));
    let warpgroups = vec![
        "attention_grad_query_bf16_sm90a_d64_with_delta",
        "attention_grad_key_value_bf16_sm90a_d64_turned",
    ];
    assert_eq!(of(shape(40, 1024, 64), Math::Bf16), Some((4, warpgroups)));
    let warps = vec![
        "attention_grad_query_tf32_d128_with_delta",
        "attention_grad_key_value_tf32_d128_turned",
    ];
    assert_eq!(of(shape(1, 65, 128), Math::Tf32), Some((4, warps.clone())));
    assert_eq!(of(shape(1, 3, 128), Math::Tf32), Some((4, warps)));
    let one = Some((4, vec!["attention_grads_f16_d32"]));
    assert_eq!(of(shape(32, 64, 32), Math::F16), one);
    // A head of another size, and f32.
    assert_eq!(of(shape(32, 64, 48), Math::F16), None);
    assert_eq!(of(shape(32, 64, 32), Math::F32), None);
}

#[test]
fn scores_gradients_are_kept_where_they_find_a_place_in_the_workspace() {
    let calls = |batch| backward(shape(batch, 1024, 128), Math::F16);
    let kept = vec![
        "attention_delta_f16_d128",
        "attention_grad_key_value_f16_sm90a_d128_keeping",
        "attention_grad_query_kept_f16_sm90a_d128",
    ];
    assert_eq!(made(&calls(30)), Some((4, kept.clone())));
    assert_eq!(made(&calls(30)[..3]), Some((3, kept)));
    let group = gradients(&calls(30), &H200).expect("a group").launches;
    assert_eq!(group.workspace_bytes, 120 * 136 * 8192);
    assert_eq!(group.zeroed_bytes, 0);
    let [_, key_value, query] = &group.launches[..] else {
        panic!("{group:?}");
    };
    // The same place, table and rotation for both, and a tile of queries a block.
    assert_eq!(key_value.args[7], Arg::Workspace { offset: 0 });
    assert_eq!(query.args[0], key_value.args[7]);
    assert_eq!(key_value.args[5..7], [Arg::Region(region(5)), Arg::U32(1)]);
    assert_eq!(query.args[3..5], key_value.args[5..7]);
    assert_eq!(query.grid, [120, 16, 1]);
    let apart = gradients(&calls(30)[..3], &H200).expect("a group").launches;
    assert_eq!(apart.launches[1].args[6], Arg::U32(0));
    assert_eq!(apart.launches[2].args[4], Arg::U32(0));
    // 124 heads of 136 tiles are more than 128 MiB.
    let group = gradients(&calls(31), &H200).expect("a group").launches;
    assert_eq!((group.launches.len(), group.workspace_bytes), (2, 0));
}

#[test]
fn without_a_rotation_behind_them_three_calls_are_served() {
    let [a, b, c, turn] = backward(shape(40, 1024, 64), Math::Bf16);
    let expected = vec![
        "attention_grad_query_bf16_sm90a_d64_with_delta",
        "attention_grad_key_value_bf16_sm90a_d64",
    ];
    let calls = [a.clone(), b.clone(), c.clone()];
    assert_eq!(made(&calls), Some((3, expected.clone())));
    let turned = |calls: &[PlacedCall]| {
        let launches = gradients(calls, &H200).expect("a group").launches.launches;
        launches[0].args[7]
    };
    assert_eq!(turned(&calls), Arg::U32(0));
    assert_eq!(
        turned(&[a.clone(), b.clone(), c.clone(), turn.clone()]),
        Arg::U32(1)
    );
    // A rotation of something else, and one of other sizes, are not part of it.
    let mut other = turn.clone();
    other.writes = vec![region(7)];
    assert_eq!(
        made(&[a.clone(), b.clone(), c.clone(), other]),
        Some((3, expected.clone()))
    );
    let mut other = turn;
    if let Op::RopeGrad(op) = &mut other.call.op {
        op.seq_len = 512;
    }
    assert_eq!(made(&[a, b, c, other]), Some((3, expected)));
}

#[test]
fn nothing_that_is_written_may_lie_over_what_is_read() {
    let calls = backward(shape(40, 1024, 64), Math::Bf16);
    assert!(made(&calls).is_some());
    // dqkv over qkv, dout, lse, delta, o and the table.
    for over in 0..6 {
        let mut calls = calls.clone();
        for call in &mut calls[1..] {
            // A byte is enough.
            call.writes[0].offset = region(over).end() - 1;
        }
        assert_eq!(made(&calls), None, "dqkv over {over}");
    }
    // delta over the others.
    for over in [0, 1, 2, 4, 5] {
        let mut calls = calls.clone();
        let at = Region {
            offset: region(over).end() - 4,
            bytes: 4,
        };
        calls[0].writes[0] = at;
        calls[1].reads[3] = at;
        calls[2].reads[3] = at;
        assert_eq!(made(&calls), None, "delta over {over}");
    }
}

#[test]
fn calls_on_other_operands_or_in_another_order_are_served_apart() {
    let calls = backward(shape(40, 1024, 64), Math::Bf16);
    for (call, operand) in [(0, 0), (1, 1), (1, 3), (2, 0), (2, 2), (2, 3)] {
        let mut calls = calls.clone();
        calls[call].reads[operand] = region(9);
        assert_eq!(made(&calls), None, "call {call}, operand {operand}");
    }
    let mut other = calls.clone();
    other[2].writes[0] = region(9);
    assert_eq!(made(&other), None);
    let mut other = calls.clone();
    other.swap(1, 2);
    assert_eq!(made(&other), None);
    // A row of the output at no multiple of 16 bytes.
    let mut other = calls;
    other[0].reads[1].offset += 8;
    assert_eq!(made(&other), None);
}

#[test]
fn a_block_holds_the_statistics_of_its_heads() {
    let of = |n_heads| {
        let mut shape = shape(32, 64, 32);
        shape.heads.n_heads = n_heads;
        let calls = backward(shape, Math::Bf16);
        let alone = |call: &PlacedCall| match &call.call.op {
            Op::AttentionGradKeyValue(op) => {
                grad_key_value(op, call, &H200).launches[0].shared_bytes
            }
            _ => 0,
        };
        let group = gradients(&calls, &H200).expect("a group");
        let shared = group.launches.launches[0].shared_bytes;
        let more = shared.saturating_sub(alone(&calls[2]));
        (group.launches.launches.len(), more)
    };
    assert_eq!(of(2), (1, 512));
    assert_eq!(of(16), (1, 4096));
    assert_eq!(of(18).0, 2, "too many heads share a key head");
}

/// The rotation and attention; table, qkv, o and lse are 0 to 3.
fn forward_calls(shape: AttentionShape, math: Math) -> [PlacedCall; 2] {
    let turn = Rope {
        rows: shape.rows(),
        seq_len: shape.seq_len,
        heads: shape.heads,
        math,
    };
    let mut attend = placed(Attention { shape, math }, &[1], 2);
    attend.writes.push(region(3));
    [placed(turn, &[0], 1), attend]
}

fn entry(calls: &[PlacedCall]) -> Option<(&'static str, u32)> {
    let group = turned(calls, &H200)?;
    assert_eq!((group.calls, group.launches.launches.len()), (2, 1));
    let launch = &group.launches.launches[0];
    Some((launch.entry, launch.grid[0]))
}

#[test]
fn a_block_rotates_what_it_attends_to_where_it_has_all_that_read_it() {
    let of = |seq_len, head_dim, math| entry(&forward_calls(shape(32, seq_len, head_dim), math));
    assert_eq!(
        of(32, 32, Math::Bf16),
        Some(("attention_turned_bf16_d32", 64))
    );
    assert_eq!(
        of(17, 64, Math::Tf32),
        Some(("attention_turned_tf32_d64", 64))
    );
    assert_eq!(
        of(1, 128, Math::F16),
        Some(("attention_turned_f16_d128", 64))
    );
    // Two heads of 33 queries are more than four warps have.
    assert_eq!(of(33, 32, Math::Bf16), None);
    assert_eq!(of(32, 48, Math::Bf16), None);
    assert_eq!(of(32, 128, Math::Tf32), None);
    assert_eq!(of(32, 32, Math::F32), None);
    let mut alone = shape(40, 64, 64);
    alone.heads.n_kv_heads = 4;
    let made = entry(&forward_calls(alone, Math::Bf16));
    let older = DeviceShape {
        warpgroups: false,
        ..H200
    };
    assert_eq!(made, None, "a warpgroup has a tile of queries");
    let made = turned(&forward_calls(alone, Math::Bf16), &older);
    assert!(made.is_some());
}

#[test]
fn a_rotation_of_something_else_is_served_apart() {
    let calls = forward_calls(shape(32, 32, 32), Math::Bf16);
    assert!(entry(&calls).is_some());
    let swapped = [calls[1].clone(), calls[0].clone()];
    assert_eq!(entry(&swapped), None);
    let mut other = calls.clone();
    other[1].reads[0] = region(9);
    assert_eq!(entry(&other), None);
    // What is written over what is read, by a byte.
    for (write, over) in [(0, 0), (0, 1), (1, 0), (1, 1), (1, 3)] {
        let mut other = calls.clone();
        other[1].writes[write].offset = region(over).end() - 1;
        assert_eq!(entry(&other), None, "{write} over {over}");
    }
    let mut other = calls.clone();
    other[0].writes[0].offset = region(0).end() - 16;
    other[1].reads[0] = other[0].writes[0];
    assert_eq!(entry(&other), None, "qkv over the table");
    let mut other = calls;
    if let Op::Rope(op) = &mut other[0].call.op {
        op.seq_len = 16;
    }
    assert_eq!(entry(&other), None);
}
