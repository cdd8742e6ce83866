//! Which products warpgroups compute, and how they are cut.

use super::*;
use crate::cuda::call::H200;
use crate::cuda::placed_calls::placed;
use crate::op::lora::Part;

fn forward(math: Math, [rows, n_in, n_out]: [usize; 3]) -> Option<(&'static str, u32)> {
    let op = Matmul {
        rows,
        n_in,
        n_out,
        bias: false,
        math,
    };
    let call = placed(op.clone(), &[0, 1], 2);
    let launch = Product::forward(&op, &call)?.alone(&H200)?;
    Some((launch.entry, launch.grid[0]))
}

fn grad_input(math: Math, [rows, n_in, n_out]: [usize; 3]) -> Option<(&'static str, u32)> {
    let op = MatmulGradInput {
        rows,
        n_in,
        n_out,
        math,
    };
    let call = placed(op.clone(), &[0, 1], 2);
    let launch = Product::grad_input(&op, &call).alone(&H200)?;
    Some((launch.entry, launch.grid[0]))
}

#[test]
fn the_tiles_that_are_done_first_are_taken() {
    let bf16 = |sizes| forward(Math::Bf16, sizes);
    let all = 132;
    assert_eq!(
        bf16([4096, 1024, 6144]),
        Some(("matmul_bf16_sm90a_256", all))
    );
    // 96 tiles of 256 columns are two rounds of 66 clusters, and so are 128 of 192.
    assert_eq!(bf16([8192, 768, 768]), Some(("matmul_bf16_sm90a_192", all)));
    assert_eq!(
        bf16([8192, 768, 2304]),
        Some(("matmul_bf16_sm90a_192", all))
    );
    assert_eq!(bf16([4096, 256, 640]), Some(("matmul_bf16_sm90a_128", all)));
    // Fewer tiles than clusters.
    assert_eq!(
        bf16([4096, 2048, 1024]),
        Some(("matmul_bf16_sm90a_256", 128))
    );
    let back = grad_input(Math::F16, [4096, 1024, 6144]);
    assert_eq!(back, Some(("matmul_grad_input_f16_sm90a_256", 128)));
}

#[test]
fn what_has_no_whole_blocks_stages_and_tiles_is_left_to_other_kernels() {
    let whole = [4096, 1024, 6144];
    assert!(forward(Math::F16, whole).is_some());
    assert_eq!(forward(Math::Tf32, whole), None);
    assert_eq!(forward(Math::F32, whole), None);
    for sizes in [
        [4096 + 128, 1024, 6144],
        [4096, 1024 + 32, 6144],
        [4096, 128, 6144],
        [4096, 1024, 6144 + 64],
        // Too few tiles for the device.
        [1024, 1024, 1024],
    ] {
        assert_eq!(forward(Math::Bf16, sizes), None, "{sizes:?}");
    }
    let op = Matmul {
        rows: 4096,
        n_in: 1024,
        n_out: 6144,
        bias: false,
        math: Math::Bf16,
    };
    let call = placed(op.clone(), &[0, 1], 2);
    let on = |call: &PlacedCall, device: &DeviceShape| {
        let product = Product::forward(&op, call)?;
        product.alone(device).map(|launch| launch.entry)
    };
    assert!(on(&call, &H200).is_some());
    let older = DeviceShape {
        warpgroups: false,
        ..H200
    };
    assert_eq!(on(&call, &older), None);
    let small = DeviceShape {
        shared_bytes_per_block: 160 << 10,
        ..H200
    };
    assert_eq!(on(&call, &small), None);
    for operand in 0..3 {
        let mut call = call.clone();
        match operand {
            2 => call.writes[0].offset += 8,
            read => call.reads[read].offset += 8,
        }
        assert_eq!(on(&call, &H200), None, "operand {operand}");
    }
    let biased = placed(op.clone(), &[0, 1, 3], 2);
    assert_eq!(on(&biased, &H200), None);
}

#[test]
fn shared_memory_is_that_of_the_kernels() {
    // Stages of 48, 40 and 32 KiB, 32 KiB of outputs on their way, barriers, and the way to a multiple of 1024.
    let of = |stages: usize, kib: usize| stages * (kib << 10) + (32 << 10) + 16 * stages + 1024;
    let sizes = TILES.map(shared_bytes);
    assert_eq!(sizes, [of(4, 48), of(4, 40), of(6, 32)]);
}

#[test]
fn parts_are_counted_where_they_make_up_all_columns() {
    let adapters = |parts: &[[usize; 2]]| Adapters {
        rank: 16,
        n_out: 1024,
        parts: parts
            .iter()
            .map(|&[first, columns]| Part { first, columns })
            .collect(),
        scale: 2.0,
    };
    let ends = |parts: &[[usize; 2]]| part_ends(&adapters(parts));
    assert_eq!(ends(&[[0, 1024]]), Some([1024, 1024, 1024]));
    let three = [[0, 512], [512, 256], [768, 256]];
    assert_eq!(ends(&three), Some([512, 768, 1024]));
    let four = [[0, 256], [256, 256], [512, 256], [768, 256]];
    assert_eq!(ends(&four), Some([256, 512, 768]));
    // A gap, a missing end, and a fifth part.
    assert_eq!(ends(&[[0, 512], [768, 256]]), None);
    assert_eq!(ends(&[[0, 512], [512, 256]]), None);
    let fifth = [[0, 256], [256, 256], [512, 256], [768, 128], [896, 128]];
    assert_eq!(ends(&fifth), None);
}
