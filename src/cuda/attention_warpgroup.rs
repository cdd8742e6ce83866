//! Launches of causal attention by warpgroups: 16-bit operands, heads of 64 and 128 columns, and calls that
//! fill a device which has `wgmma`. Bits are those of the other kernels.
//!
//! A block is some warpgroups of 64 rows of one head: queries, or keys in the key and value pass.

use super::attention::Pass;
use super::call::{Arg, DeviceShape, KernelLaunch};
use crate::op::attention::{AttentionShape, KEY_TILE};
use crate::shape::Math;

/// Rows of a warpgroup, and of a tile.
pub(super) const TILE: usize = KEY_TILE;
pub(super) const GROUP_THREADS: usize = 128;
/// Bytes by which a block moves its shared memory to an aligned start.
pub(super) const ALIGNMENT: usize = 1024;

/// A kernel's size; the entries in `ptx/attention*_sm90a.cu` say the same.
#[derive(Clone, Copy, Debug)]
struct Kernel {
    /// The kernel's names in bf16 and f16.
    entries: [&'static str; 2],
    head_dim: usize,
    groups: usize,
    stages: usize,
}

/// The kernels of a pass for heads of 64 and of 128 columns, by groups and stages.
macro_rules! kernels {
    ($pass:literal, $narrow:expr, $wide:expr) => {
        [
            kernels!($pass, "d64", 64, $narrow),
            kernels!($pass, "d128", 128, $wide),
        ]
    };
    ($pass:literal, $suffix:literal, $head_dim:literal, $size:expr) => {
        Kernel {
            entries: [
                concat!($pass, "_bf16_sm90a_", $suffix),
                concat!($pass, "_f16_sm90a_", $suffix),
            ],
            head_dim: $head_dim,
            groups: $size.0,
            stages: $size.1,
        }
    };
}

const FORWARD: [Kernel; 2] = kernels!("attention", (2, 4), (3, 3));
const GRAD_QUERY: [Kernel; 2] = kernels!("attention_grad_query", (1, 3), (2, 4));
const GRAD_KEY_VALUE: [Kernel; 2] = kernels!("attention_grad_key_value", (1, 3), (2, 3));

fn kernels(pass: Pass) -> &'static [Kernel; 2] {
    match pass {
        Pass::Forward => &FORWARD,
        Pass::GradQuery => &GRAD_QUERY,
        Pass::GradKeyValue => &GRAD_KEY_VALUE,
    }
}

/// Dynamic shared memory of a block, laid out as the kernels say.
fn shared_bytes(pass: Pass, kernel: &Kernel) -> usize {
    let tile = TILE * kernel.head_dim * 2;
    let (own, statistics) = match pass {
        Pass::Forward => (tile, 0),
        Pass::GradQuery => (2 * tile, 0),
        Pass::GradKeyValue => (2 * tile, 2 * TILE * size_of::<f32>()),
    };
    kernel.groups * own + kernel.stages * (2 * tile + statistics) + ALIGNMENT
}

/// The launch of a pass, whose rows of a head lie at multiples of 16 bytes; none where the device, the operands or
/// the head ask for another kernel, or where there are too few blocks for the device.
pub(super) fn launch(
    pass: Pass,
    (shape, math): (&AttentionShape, Math),
    args: &[Arg],
    device: &DeviceShape,
) -> Option<KernelLaunch> {
    let format = match math {
        Math::Bf16 => 0,
        Math::F16 => 1,
        Math::Tf32 | Math::F32 => return None,
    };
    let mut kernels = kernels(pass).iter();
    let kernel = kernels.find(|kernel| kernel.head_dim == shape.heads.head_dim)?;
    let blocks = shape.seq_len.div_ceil(TILE).div_ceil(kernel.groups);
    let grid = [pass.sequences(shape), blocks, 1];
    let filled = shape.seq_len >= TILE && grid[0] * blocks >= device.multiprocessors as usize;
    (device.warpgroups && filled).then(|| KernelLaunch {
        entry: kernel.entries[format],
        grid: grid.map(|n| n as u32),
        block: [(GROUP_THREADS * kernel.groups) as u32, 1, 1],
        shared_bytes: shared_bytes(pass, kernel) as u32,
        args: args.to_vec(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::placed_calls::shape;

    const DEVICE: DeviceShape = DeviceShape {
        multiprocessors: 132,
        shared_bytes_per_block: 232_448,
        warpgroups: true,
    };
    const PASSES: [Pass; 3] = [Pass::Forward, Pass::GradQuery, Pass::GradKeyValue];

    #[test]
    fn every_kernel_fits_the_device() {
        for (pass, kernel) in PASSES
            .iter()
            .flat_map(|&p| kernels(p).iter().map(move |k| (p, k)))
        {
            let bytes = shared_bytes(pass, kernel);
            assert!(
                bytes <= DEVICE.shared_bytes_per_block as usize,
                "{kernel:?}: {bytes}"
            );
        }
    }

    #[test]
    fn only_calls_that_fill_the_device_are_taken() {
        let of = |shape: AttentionShape, math, device: &DeviceShape| {
            let launch = launch(Pass::Forward, (&shape, math), &[], device);
            launch.map(|launch| (launch.entry, launch.grid))
        };
        let taken = of(shape(32, 1000, 64), Math::Bf16, &DEVICE);
        assert_eq!(taken, Some(("attention_bf16_sm90a_d64", [128, 8, 1])));
        let taken = of(shape(32, 1000, 128), Math::F16, &DEVICE);
        assert_eq!(taken, Some(("attention_f16_sm90a_d128", [128, 6, 1])));
        assert_eq!(of(shape(1, 1000, 64), Math::Bf16, &DEVICE), None);
        assert_eq!(of(shape(500, 63, 64), Math::Bf16, &DEVICE), None);
        assert_eq!(of(shape(32, 1000, 64), Math::Tf32, &DEVICE), None);
        assert_eq!(of(shape(32, 1000, 96), Math::Bf16, &DEVICE), None);
        let other = DeviceShape {
            warpgroups: false,
            ..DEVICE
        };
        assert_eq!(of(shape(32, 1000, 64), Math::Bf16, &other), None);
    }
}
