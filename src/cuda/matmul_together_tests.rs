//! Which calls a product serves with it.

use super::*;
use crate::cuda::call::H200;
use crate::cuda::placed_calls::{parts, placed};
use crate::op::lora::{Adapters, LoraDown, LoraDownGradInput, LoraUp};
use crate::op::matmul::{Matmul, MatmulGradInput};
use crate::shape::Math;

const ROWS: usize = 4096;

/// A product for these parts of columns and its adapters' sums; x, weight, y, s, b and a are 0 to 5.
fn adapted(math: Math, rank: usize, columns: &[usize]) -> [PlacedCall; 3] {
    let parts = parts(columns);
    let (n_in, n_out) = (1024, columns.iter().sum());
    let product = Matmul {
        rows: ROWS,
        n_in,
        n_out,
        bias: false,
        math,
    };
    let down = LoraDown {
        rows: ROWS,
        n_in,
        ranks: rank * parts.len(),
        math,
    };
    let adapters = Adapters {
        rank,
        n_out,
        parts,
        scale: 2.0,
    };
    let up = LoraUp {
        rows: ROWS,
        adapters,
        math,
    };
    [
        placed(product, &[0, 1], 2),
        placed(down, &[0, 5], 3),
        placed(up, &[3, 4], 2),
    ]
}

fn made(calls: &[PlacedCall]) -> Option<(usize, Vec<&'static str>)> {
    let group = forward(calls, &H200).or_else(|| backward(calls, &H200))?;
    let launches = group.launches.launches.iter();
    Some((group.calls, launches.map(|launch| launch.entry).collect()))
}

#[test]
fn adapters_are_added_to_their_product_in_its_launch() {
    let of = |math, rank, columns: &[usize]| {
        let [product, _, up] = adapted(math, rank, columns);
        made(&[product, up])
    };
    let bf16 = |rank, columns: &[usize]| of(Math::Bf16, rank, columns);
    let wide = Some((2, vec!["matmul_bf16_sm90a_lora_up_256"]));
    assert_eq!(bf16(16, &[2048, 1024, 1024]), wide);
    assert_eq!(bf16(64, &[4096]), wide);
    let found = of(Math::F16, 32, &[768, 768]);
    assert_eq!(found, Some((2, vec!["matmul_f16_sm90a_lora_up_192"])));
    // A part that is no whole tile, terms that are no whole step or too many, and other precisions.
    assert_eq!(bf16(16, &[2048, 1024, 1024 + 64]), None);
    assert_eq!(bf16(8, &[2048, 1024, 1024]), None);
    assert_eq!(bf16(32, &[2048, 1024, 1024]), None);
    assert_eq!(of(Math::Tf32, 16, &[4096]), None);
}

#[test]
fn a_lower_product_between_them_comes_first() {
    let calls = adapted(Math::Bf16, 16, &[2048, 1024, 1024]);
    let (served, launches) = made(&calls).expect("a group");
    assert_eq!((served, launches.len()), (3, 2));
    assert_eq!(launches[1], "matmul_bf16_sm90a_lora_up_256");
    // One that writes what the product reads or writes keeps its place.
    for over in [0, 1, 2] {
        let mut calls = calls.clone();
        calls[1].writes[0].offset = over << 20;
        assert_eq!(made(&calls), None, "{over}");
    }
    assert_eq!(made(&calls[..2]), None);
}

#[test]
fn sums_of_something_else_or_over_what_they_read_stand_alone() {
    let [product, _, up] = adapted(Math::Bf16, 16, &[4096]);
    assert!(made(&[product.clone(), up.clone()]).is_some());
    let mut elsewhere = up.clone();
    elsewhere.writes[0].offset = 9 << 20;
    assert_eq!(made(&[product.clone(), elsewhere]), None);
    let mut over = up.clone();
    over.reads[0].offset = 2 << 20;
    assert_eq!(made(&[product.clone(), over]), None);
    assert_eq!(made(&[up, product]), None);
}

#[test]
fn the_adapters_part_of_a_gradient_is_added_in_the_products_launch() {
    let math = Math::Bf16;
    let input = MatmulGradInput {
        rows: ROWS,
        n_in: 1024,
        n_out: 4096,
        math,
    };
    let part = |ranks, store| LoraDownGradInput {
        rows: ROWS,
        n_in: 1024,
        ranks,
        store,
        math,
    };
    let of = |ranks, store, write| {
        let calls = [
            placed(input.clone(), &[0, 1], 2),
            placed(part(ranks, store), &[3, 4], write),
        ];
        made(&calls)
    };
    let together = Some((2, vec!["matmul_grad_input_bf16_sm90a_lora_down_256"]));
    assert_eq!(of(48, Store::Add, 2), together);
    assert_eq!(of(64, Store::Add, 2), together);
    assert_eq!(of(80, Store::Add, 2), None);
    assert_eq!(of(24, Store::Add, 2), None);
    assert_eq!(of(48, Store::Assign, 2), None);
    assert_eq!(of(48, Store::Add, 5), None);
}
