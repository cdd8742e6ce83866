//! Launches that turn NF4 weights back into numbers.

use super::call::{CallLaunches, DeviceShape};
use super::rows::{entry, numbers, one, regions};
use crate::layout::PlacedCall;
use crate::op::nf4::Dequantise;

/// Threads of a block, and elements that each serves by eights.
const THREADS: usize = 256;
const ELEMENTS_OF_THREAD: usize = 32;

/// `weight[i] = code(packed, i) · maxima[i / 64]`; reads packed, maxima, writes weight.
pub fn dequantise(op: &Dequantise, call: &PlacedCall, _: &DeviceShape) -> CallLaunches {
    let operands = [call.reads[0], call.reads[1], call.writes[0]];
    let whole = op.elements.is_multiple_of(8);
    let by_octets = whole && operands.iter().all(|r| r.offset.is_multiple_of(16));
    let (entry, of_block) = match by_octets {
        true => (
            entry!(op.math, "nf4_dequantise", "_octets"),
            THREADS * ELEMENTS_OF_THREAD,
        ),
        false => (entry!(op.math, "nf4_dequantise", ""), THREADS),
    };
    let mut args = regions(operands).to_vec();
    args.extend(numbers([op.elements]));
    let blocks = op.elements.div_ceil(of_block);
    one(entry, [blocks, 1], [THREADS as u32, 1], args)
}

#[cfg(test)]
mod tests {
    use crate::num::nf4::CODE;

    #[test]
    fn the_kernels_have_the_codes_of_the_contract() {
        let header = include_str!("../../ptx/nf4_dequantise.cuh");
        let (_, list) = header.split_once("bits[16] = {").expect("a list of bits");
        let (list, _) = list.split_once('}').expect("an end of it");
        let found: Vec<&str> = list.split(',').map(str::trim).collect();
        let bits = CODE.map(|value| format!("{:#010x}", value.to_bits()));
        assert_eq!(found, bits);
    }
}
