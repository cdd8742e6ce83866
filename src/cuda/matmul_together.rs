//! A product and what follows it in a layer, in one launch of a graph (`matmul_warpgroup.rs`): the sums of adapters and SwiGLU
//! behind a product, the adapters' part and SwiGLU's gradient behind the gradient of an input.
//!
//! What the product leaves is rounded as it is stored alone, so no bit depends on it.

use super::call::{CallLaunches, DeviceShape};
use super::issue::launches;
use super::matmul_warpgroup::Product;
use super::together::{Group, independent};
use crate::layout::{PlacedCall, Region};
use crate::op::swiglu::Output;
use crate::op::{Op, Store};

/// Whether nothing that is read shares a byte with `written`, where some blocks still read while others write.
fn apart<'a>(written: &Region, mut read: impl Iterator<Item = &'a Region>) -> bool {
    !read.any(|read| read.overlaps(written))
}

/// A product, the sums of adapters, and SwiGLU, or two of them. Where a forward pass is repeated, the lower product of the
/// adapters stands behind the product; then it is launched before.
pub(super) fn forward(calls: &[PlacedCall], device: &DeviceShape) -> Option<Group> {
    let (first, mut rest) = calls.split_first()?;
    let Op::Matmul(op) = &first.call.op else {
        return None;
    };
    let product = Product::forward(op, first)?;
    let y = first.writes[0];
    let mut before = CallLaunches::default();
    if let [down, others @ ..] = rest
        && let Op::LoraDown(_) = &down.call.op
        && independent(first, down)
    {
        before = launches(&down.call.op, down, device);
        rest = others;
    }
    let up = rest.split_first().and_then(|(call, others)| {
        let Op::LoraUp(op) = &call.call.op else {
            return None;
        };
        (call.writes[0] == y && apart(&y, call.reads.iter())).then_some((op, call, others))
    });
    // A lower product that belongs to no sum here would have moved for nothing.
    if up.is_none() && !before.launches.is_empty() {
        return None;
    }
    let read = || {
        first
            .reads
            .iter()
            .chain(up.iter().flat_map(|up| &up.1.reads))
    };
    let behind = up.map_or(rest, |up| up.2);
    let gated = behind.first().and_then(|call| {
        let Op::SwiGlu(swiglu) = &call.call.op else {
            return None;
        };
        let a = call.writes[0];
        let of_product =
            call.reads[0] == y && [swiglu.rows, 2 * swiglu.d_ff] == [op.rows, op.n_out];
        (of_product && apart(&a, read().chain([&y]))).then_some(a)
    });
    let launch = match (up, gated) {
        (Some((up, call, _)), a) => {
            let both = a.and_then(|_| product.with_lora_up((up, call), a, device));
            let both = both.map(|launch| (launch, behind.len() - 1));
            both.or_else(|| {
                let launch = product.with_lora_up((up, call), None, device)?;
                Some((launch, behind.len()))
            })
        }
        (None, Some(a)) => product
            .with_swiglu(a, device)
            .map(|l| (l, behind.len() - 1)),
        (None, None) => None,
    };
    let (launch, left) = launch?;
    before.launches.push(launch);
    Some(Group {
        calls: calls.len() - left,
        launches: before,
    })
}

/// The gradient of an input, the adapters' part in it, and SwiGLU's gradient, or two of them.
pub(super) fn backward(calls: &[PlacedCall], device: &DeviceShape) -> Option<Group> {
    let (first, rest) = calls.split_first()?;
    let Op::MatmulGradInput(op) = &first.call.op else {
        return None;
    };
    let product = Product::grad_input(op, first);
    let dx = first.writes[0];
    let down = rest.first().and_then(|call| {
        let Op::LoraDownGradInput(down) = &call.call.op else {
            return None;
        };
        let added = call.writes[0] == dx && down.store == Store::Add;
        (added && apart(&dx, call.reads.iter())).then_some((down, call))
    });
    let read = || {
        first
            .reads
            .iter()
            .chain(down.iter().flat_map(|down| &down.1.reads))
    };
    let behind = &rest[usize::from(down.is_some())..];
    let gate_up = behind.first().and_then(|call| {
        let Op::SwiGluGrad(grad) = &call.call.op else {
            return None;
        };
        let [da, gate_up] = call.writes[..] else {
            return None;
        };
        let of_product = da == dx && [grad.rows, grad.d_ff] == [op.rows, op.n_in];
        let restored = grad.output == Output::Restored;
        let free = apart(&gate_up, read()) && !gate_up.overlaps(&da);
        (of_product && restored && free).then_some(gate_up)
    });
    let all = gate_up.and_then(|gate_up| product.with_swiglu_grad(gate_up, down, device));
    let all = all.map(|launch| (launch, behind.len() - 1));
    let (launch, left) = all.or_else(|| {
        let launch = product.with_lora_down(down?, device)?;
        Some((launch, behind.len()))
    })?;
    Some(Group {
        calls: calls.len() - left,
        launches: launch.into(),
    })
}

#[cfg(test)]
#[path = "matmul_together_tests.rs"]
mod tests;
