//! Launches of causal attention in the tensor-core domains.
//!
//! A block owns 16 rows of one head a warp: queries, or keys in the key and value pass. Kernels for heads of
//! 32, 64 and 128 columns read 16 bytes at a time; the passes over keys come with many rows a block, for
//! throughput, and with few, so that a small call has blocks for every multiprocessor. The others take
//! heads of any size up to theirs, at any alignment. Bits do not depend on the choice.

use super::attention::Pass;
use super::attention_warpgroup;
use super::call::{Arg, CallLaunches, DeviceShape, KernelLaunch};
use crate::op::attention::AttentionShape;
use crate::shape::Math;

/// Rows of a warp.
const WARP_ROWS: usize = 16;
/// Bytes by which a block moves its shared memory to an aligned start.
pub(super) const ALIGNMENT: usize = 128;

/// A kernel's size; the entries in `ptx/attention*_{bf16,f16,tf32}.cu` say the same.
#[derive(Clone, Copy, Debug)]
struct Kernel {
    /// The kernel's names in bf16, f16 and tf32; an empty one is not there.
    entries: [&'static str; 3],
    /// The head's columns, and whether it must have exactly so many.
    columns: (usize, Fit),
    warps: [usize; 3],
    /// Rows of a warp.
    warp_rows: usize,
    /// Whether a call must have blocks of this size for the whole device, twice over.
    large: bool,
}

impl Kernel {
    /// Rows of a block.
    fn rows(&self, math: Math) -> usize {
        self.warp_rows * self.warps[format(math)]
    }
}

/// Which heads a kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fit {
    /// Those of its size, aligned to 16 bytes.
    Exact,
    /// Those up to its size.
    UpTo,
}

/// The names of a kernel in the three formats.
macro_rules! entries {
    ($pass:literal, $variant:literal) => {
        [
            concat!($pass, "_bf16_", $variant),
            concat!($pass, "_f16_", $variant),
            concat!($pass, "_tf32_", $variant),
        ]
    };
}

const fn kernel(entries: [&'static str; 3], columns: usize, fit: Fit, warps: [usize; 3]) -> Kernel {
    Kernel {
        entries,
        columns: (columns, fit),
        warps,
        warp_rows: WARP_ROWS,
        large: false,
    }
}

/// Of the queries of two steps a warp reads every key once.
const fn large(entries: [&'static str; 3], columns: usize) -> Kernel {
    Kernel {
        large: true,
        warp_rows: 2 * WARP_ROWS,
        ..kernel(entries, columns, Fit::Exact, [4; 3])
    }
}

const FORWARD: &[Kernel] = &[
    large(entries!("attention", "d64"), 64),
    large(entries!("attention", "d128"), 128),
    kernel(entries!("attention", "d32"), 32, Fit::Exact, [4; 3]),
    kernel(entries!("attention", "d64_small"), 64, Fit::Exact, [4; 3]),
    kernel(entries!("attention", "d128_small"), 128, Fit::Exact, [4; 3]),
    kernel(entries!("attention", "any64"), 64, Fit::UpTo, [4; 3]),
    kernel(entries!("attention", "any128"), 128, Fit::UpTo, [4; 3]),
    kernel(entries!("attention", "any256"), 256, Fit::UpTo, [4; 3]),
];

/// The kernels of a backward pass, all of 16 rows a warp; own rows of 256 columns leave tf32 room for two warps.
macro_rules! backward {
    ($pass:literal) => {
        &[
            kernel(entries!($pass, "d32"), 32, Fit::Exact, [4; 3]),
            kernel(entries!($pass, "d64"), 64, Fit::Exact, [4; 3]),
            kernel(entries!($pass, "d128"), 128, Fit::Exact, [4; 3]),
            kernel(entries!($pass, "any64"), 64, Fit::UpTo, [4; 3]),
            kernel(entries!($pass, "any128"), 128, Fit::UpTo, [4; 3]),
            kernel(entries!($pass, "any256"), 256, Fit::UpTo, [4, 4, 2]),
        ]
    };
}

const GRAD_QUERY: &[Kernel] = backward!("attention_grad_query");
const GRAD_KEY_VALUE: &[Kernel] = backward!("attention_grad_key_value");

fn kernels(pass: Pass) -> &'static [Kernel] {
    match pass {
        Pass::Forward => FORWARD,
        Pass::GradQuery => GRAD_QUERY,
        Pass::GradKeyValue => GRAD_KEY_VALUE,
    }
}

/// Rows of the others in a stage of a kernel's shared memory.
fn stage_rows(pass: Pass, columns: usize, math: Math) -> usize {
    match (pass, columns, math) {
        (Pass::Forward, ..) => 64,
        (Pass::GradKeyValue, 128, Math::Tf32) | (_, 256, _) => 32,
        _ => 64,
    }
}

/// Dynamic shared memory of a block, laid out as the kernels say.
fn shared_bytes(pass: Pass, kernel: &Kernel, math: Math) -> usize {
    let (columns, fit) = kernel.columns;
    let row = columns * math.storage().size();
    let own = kernel.rows(math) * row;
    let exact = if fit == Fit::Exact { math } else { Math::F16 };
    let rows = stage_rows(pass, columns, exact);
    let bytes = match pass {
        // One stage, and the queries beside it.
        Pass::Forward if columns == 256 => own + 2 * rows * row,
        // Queries that stay in registers come through the second stage.
        Pass::Forward if kernel.warp_rows == WARP_ROWS => 2 * 2 * rows * row,
        Pass::Forward => own + 2 * 2 * rows * row,
        Pass::GradQuery => 2 * own + 2 * 2 * rows * row,
        Pass::GradKeyValue => 2 * own + 2 * (2 * rows * row + 8 * rows),
    };
    bytes + ALIGNMENT
}

/// Blocks that share a head's rows, each for some of its columns.
fn slices(pass: Pass, kernel: &Kernel) -> usize {
    match (pass, kernel.columns) {
        (Pass::GradKeyValue, (columns, Fit::UpTo)) => columns / 64,
        _ => 1,
    }
}

/// The kernel for a call, `None` for a head that is too large for all; `wide` if every row of a head
/// lies at a multiple of 16 bytes.
fn find(
    pass: Pass,
    (shape, math): (&AttentionShape, Math),
    wide: bool,
    device: &DeviceShape,
) -> Option<&'static Kernel> {
    let head_dim = shape.heads.head_dim;
    let serves = |kernel: &&Kernel| {
        let rows = kernel.rows(math);
        let blocks = pass.sequences(shape) * shape.seq_len.div_ceil(rows);
        let filled = shape.seq_len >= rows && blocks >= 2 * device.multiprocessors as usize;
        let fits = match kernel.columns {
            (columns, Fit::Exact) => wide && head_dim == columns,
            (columns, Fit::UpTo) => head_dim <= columns,
        };
        fits && (!kernel.large || filled)
    };
    kernels(pass).iter().find(serves)
}

/// The launch of a pass over at least one row; `wide` if every row of a head lies at a multiple of 16 bytes,
/// `args` are what all kernels of attention take. None where the head has more than 256 columns.
pub(super) fn launch(
    pass: Pass,
    (shape, math): (&AttentionShape, Math),
    (wide, args): (bool, Vec<Arg>),
    device: &DeviceShape,
) -> CallLaunches {
    if wide && let Some(launch) = attention_warpgroup::launch(pass, (shape, math), &args, device) {
        return launch.into();
    }
    let Some(kernel) = find(pass, (shape, math), wide, device) else {
        return CallLaunches::default();
    };
    let warps = kernel.warps[format(math)];
    let blocks = shape.seq_len.div_ceil(kernel.rows(math));
    let grid = [pass.sequences(shape), blocks, slices(pass, kernel)];
    let launch = KernelLaunch {
        entry: kernel.entries[format(math)],
        grid: grid.map(|n| n as u32),
        block: [32 * warps as u32, 1, 1],
        shared_bytes: shared_bytes(pass, kernel, math) as u32,
        args,
    };
    launch.into()
}

/// The place of a format in a kernel's lists.
fn format(math: Math) -> usize {
    match math {
        Math::Bf16 => 0,
        Math::F16 => 1,
        Math::Tf32 | Math::F32 => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::rope::Heads;
    use crate::shape::Math;

    const DEVICE: DeviceShape = DeviceShape {
        multiprocessors: 132,
        shared_bytes_per_block: 232_448,
        warpgroups: true,
    };
    const PASSES: [Pass; 3] = [Pass::Forward, Pass::GradQuery, Pass::GradKeyValue];
    const FORMATS: [Math; 3] = [Math::Bf16, Math::F16, Math::Tf32];

    fn shape(batch: usize, seq_len: usize, head_dim: usize) -> AttentionShape {
        let heads = Heads {
            n_heads: 4,
            n_kv_heads: 2,
            head_dim,
        };
        AttentionShape {
            batch,
            seq_len,
            heads,
        }
    }

    fn entry(pass: Pass, shape: &AttentionShape, math: Math, wide: bool) -> &'static str {
        let kernel = find(pass, (shape, math), wide, &DEVICE).expect("a kernel");
        kernel.entries[format(math)]
    }

    #[test]
    fn every_kernel_fits_the_device() {
        for (pass, math) in PASSES.iter().flat_map(|&p| FORMATS.map(|m| (p, m))) {
            for kernel in kernels(pass) {
                let bytes = shared_bytes(pass, kernel, math);
                let name = kernel.entries[format(math)];
                assert!(
                    bytes <= DEVICE.shared_bytes_per_block as usize,
                    "{name}: {bytes}"
                );
            }
        }
    }

    #[test]
    fn kernels_follow_size_and_alignment() {
        let of = |seq_len, head_dim, wide| {
            let shape = shape(32, seq_len, head_dim);
            entry(Pass::Forward, &shape, Math::Bf16, wide)
        };
        assert_eq!(of(1024, 64, true), "attention_bf16_d64");
        assert_eq!(of(1024, 64, false), "attention_bf16_any64");
        assert_eq!(of(32, 64, true), "attention_bf16_d64_small");
        assert_eq!(of(32, 48, true), "attention_bf16_any64");
        assert_eq!(of(32, 2, true), "attention_bf16_any64");
        assert_eq!(of(32, 65, true), "attention_bf16_any128");
        assert_eq!(of(32, 256, true), "attention_bf16_any256");
        let beyond = find(Pass::Forward, (&shape(1, 1, 257), Math::F16), true, &DEVICE);
        assert!(beyond.is_none());
    }
}
