use super::*;
use crate::cuda::call::H200;
use crate::cuda::matmul;
use crate::layout::Region;
use crate::num::tree::TokenSum;
use crate::op::matmul::{Matmul, MatmulGradInput};
use crate::op::{Op, OpCall, Store};
use crate::shape::Math;

/// A device without warpgroups, which would take the large products.
const OLDER: DeviceShape = DeviceShape {
    warpgroups: false,
    ..H200
};

const KINDS: [Math; 3] = [Math::Tf32, Math::Bf16, Math::F16];

/// A call whose operands follow each other from `start` on.
fn placed(op: impl Into<Op>, start: usize) -> PlacedCall {
    let op = op.into();
    let signature = op.rule().signature();
    let mut offset = start;
    let mut place = |operand: &crate::op::Operand| {
        let bytes = operand.shape.elements() * operand.dtype.size();
        let region = Region { offset, bytes };
        offset += bytes;
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

fn entry(launches: &CallLaunches) -> (&'static str, u32) {
    let [launch] = &launches.launches[..] else {
        panic!("{} launches", launches.launches.len());
    };
    (launch.entry, launch.grid[0])
}

fn forward_entry(math: Math, [rows, n_in, n_out]: [usize; 3], start: usize) -> (&'static str, u32) {
    let op = Matmul {
        math,
        rows,
        n_in,
        n_out,
        bias: false,
    };
    entry(&matmul::forward(&op, &placed(op.clone(), start), &OLDER))
}

#[test]
fn large_products_take_large_tiles_and_small_ones_fill_the_gpu() {
    assert_eq!(
        forward_entry(Math::Bf16, [8192, 768, 2304], 0),
        ("matmul_bf16_128x128", 64 * 18)
    );
    assert_eq!(
        forward_entry(Math::F16, [1024, 128, 128], 0),
        ("matmul_f16_32x32", 128)
    );
    assert_eq!(
        forward_entry(Math::Tf32, [1024, 128, 384], 0),
        ("matmul_tf32_64x64", 96)
    );
}

#[test]
fn operands_that_vectors_cannot_reach_take_kernels_without_them() {
    let of = |math, sizes, start| forward_entry(math, sizes, start).0;
    assert_eq!(of(Math::Bf16, [1024, 128, 128], 2), "matmul_bf16_32x32_any");
    // Rows of four halves are eight bytes; of four floats, sixteen.
    assert_eq!(of(Math::F16, [1024, 132, 128], 0), "matmul_f16_32x32_any");
    assert_eq!(of(Math::Tf32, [1024, 132, 128], 0), "matmul_tf32_32x32");
    assert_eq!(
        of(Math::Bf16, [8192, 767, 2304], 0),
        "matmul_bf16_128x128_any"
    );
}

#[test]
fn a_device_with_little_shared_memory_takes_smaller_tiles() {
    let work = Work {
        m: 8192,
        n: 8192,
        pieces: 1,
        vectors: true,
    };
    let little = DeviceShape {
        shared_bytes_per_block: 65_536,
        ..H200
    };
    assert_eq!(best_tile(&work, &H200), Tile::T128);
    assert_eq!(best_tile(&work, &little), Tile::T64);
}

#[test]
fn each_kind_has_kernels_of_its_own_for_each_op() {
    for math in KINDS {
        let grad_input = MatmulGradInput {
            math,
            rows: 8192,
            n_in: 768,
            n_out: 768,
        };
        let call = placed(grad_input.clone(), 0);
        let made = matmul::grad_input(&grad_input, &call, &OLDER);
        let expected = format!("matmul_grad_input_{}_128x128", math.name());
        assert_eq!(entry(&made), (expected.as_str(), 64 * 6));
    }
}

#[test]
fn the_workspace_of_a_weight_gradient_holds_counters_and_partials_in_f32() {
    let op = |math, piece| MatmulGradWeight {
        math,
        n_in: 128,
        n_out: 384,
        sum: TokenSum {
            tokens: 1024,
            grain: 1024,
            piece,
        },
        store: Store::Assign,
    };
    for math in KINDS {
        let of = |op: MatmulGradWeight| matmul::grad_weight(&op, &placed(op.clone(), 0), &H200);
        // Sixteen pieces are more than a block has warps.
        let made = of(op(math, 64));
        let expected = format!("matmul_grad_weight_{}_64x64", math.name());
        assert_eq!(entry(&made), (expected.as_str(), 16 * 12));
        assert_eq!(made.zeroed_bytes, 256);
        assert_eq!(made.workspace_bytes - 256, 16 * 384 * 128 * 4);
        let made = of(op(math, 128));
        let expected = format!("matmul_grad_weight_{}_whole_32x32", math.name());
        assert_eq!(entry(&made), (expected.as_str(), 48));
        assert_eq!(made.launches[0].block, [256, 1, 1]);
        assert_eq!((made.workspace_bytes, made.zeroed_bytes), (0, 0));
        let whole = of(op(math, 1024));
        assert_eq!((whole.workspace_bytes, whole.zeroed_bytes), (0, 0));
    }
}

#[test]
fn a_product_without_outputs_launches_nothing_and_one_without_terms_does() {
    let launches = |rows, n_in| {
        let op = Matmul {
            math: Math::Bf16,
            rows,
            n_in,
            n_out: 4,
            bias: false,
        };
        let made = matmul::forward(&op, &placed(op.clone(), 0), &OLDER);
        made.launches.len()
    };
    assert_eq!(launches(0, 4), 0);
    assert_eq!(launches(4, 0), 1);
}
