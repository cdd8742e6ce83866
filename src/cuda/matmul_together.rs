//! A large product and the sums of adapters behind it, in one launch of a graph (`matmul_warpgroup.rs`): forward, and in the gradient
//! of an input.
//!
//! What the product leaves is rounded as it is stored alone, so no bit depends on it.

use super::call::{CallLaunches, DeviceShape};
use super::issue::launches;
use super::matmul_warpgroup::Product;
use super::together::{Group, independent};
use crate::layout::PlacedCall;
use crate::op::{Op, Store};

/// Whether a call adds to what the product has written, and reads nothing of it.
fn adds_to(product: &PlacedCall, call: &PlacedCall) -> bool {
    let y = product.writes[0];
    call.writes[0] == y && !call.reads.iter().any(|read| read.overlaps(&y))
}

/// A product and the sums of its adapters. Where a forward pass is repeated, the adapters' lower product stands between them; then
/// it is launched before both.
pub(super) fn forward(calls: &[PlacedCall], device: &DeviceShape) -> Option<Group> {
    let (first, rest) = calls.split_first()?;
    let Op::Matmul(op) = &first.call.op else {
        return None;
    };
    let product = Product::forward(op, first)?;
    let between = match rest.first() {
        Some(down) if matches!(down.call.op, Op::LoraDown(_)) => Some(down),
        _ => None,
    };
    if between.is_some_and(|down| !independent(first, down)) {
        return None;
    }
    let behind = &rest[usize::from(between.is_some())..];
    let up = behind.first()?;
    let Op::LoraUp(op) = &up.call.op else {
        return None;
    };
    if !adds_to(first, up) {
        return None;
    }
    let launch = product.with_lora_up((op, up), device)?;
    let mut served = between.map_or_else(CallLaunches::default, |down| {
        launches(&down.call.op, down, device)
    });
    served.launches.push(launch);
    Some(Group {
        calls: calls.len() + 1 - behind.len(),
        launches: served,
    })
}

/// The gradient of an input, and the adapters' part in it.
pub(super) fn backward(calls: &[PlacedCall], device: &DeviceShape) -> Option<Group> {
    let [first, down, ..] = calls else {
        return None;
    };
    let (Op::MatmulGradInput(op), Op::LoraDownGradInput(part)) = (&first.call.op, &down.call.op)
    else {
        return None;
    };
    let added = part.store == Store::Add && adds_to(first, down);
    let launch = || Product::grad_input(op, first).with_lora_down((part, down), device);
    Some(Group {
        calls: 2,
        launches: added.then(launch).flatten()?.into(),
    })
}

#[cfg(test)]
#[path = "matmul_together_tests.rs"]
mod tests;
