//! The adapters' wide matrices in 16-bit precisions: strips of 64 columns that warps go down (`ptx/lora_wide.cuh`).
//!
//! They read and write a matrix in place near what memory allows, where every row is whole strips and a chain has at
//! most three steps; other shapes are left to the kernels of any shape, which give the same bits.

use super::call::{Arg, DeviceShape, KernelLaunch};
use super::rows::{by_vectors, number, numbers};
use crate::layout::Region;
use crate::shape::Math;

/// Columns of a warp, and warps of a block; the kernels say so too.
const STRIP_COLUMNS: usize = 64;
const WARPS: usize = 4;
/// Rows that are under way together: there are no others in a run.
const STAGE_ROWS: usize = 16;
/// The fewest rows over which a warp's factors are worth their reading.
const LEAST_RUN_ROWS: usize = 32;
/// Blocks of a multiprocessor, by their registers.
const RESIDENT_BLOCKS: usize = 4;
/// The most terms of a chain, and the terms of one step.
const MOST_TERMS: usize = 48;
const STEP_TERMS: usize = 16;

/// The kernel of a stem for chains of so many terms.
macro_rules! entry {
    ($math:expr, $terms:expr, $stem:literal) => {
        match ($math, $terms.div_ceil(STEP_TERMS)) {
            (Math::Bf16, 1) => Some(concat!($stem, "_bf16_wide_16")),
            (Math::Bf16, 2) => Some(concat!($stem, "_bf16_wide_32")),
            (Math::Bf16, 3) => Some(concat!($stem, "_bf16_wide_48")),
            (Math::F16, 1) => Some(concat!($stem, "_f16_wide_16")),
            (Math::F16, 2) => Some(concat!($stem, "_f16_wide_32")),
            (Math::F16, 3) => Some(concat!($stem, "_f16_wide_48")),
            _ => None,
        }
    };
}

/// The kernel of the sum.
pub(super) fn up_entry(math: Math, rank: usize) -> Option<&'static str> {
    entry!(math, rank, "lora_up")
}

/// The kernel of the gradient of the lower product's input.
pub(super) fn down_grad_input_entry(math: Math, ranks: usize) -> Option<&'static str> {
    entry!(math, ranks, "lora_down_grad_input")
}

/// The kernel of the sum to a gate and an up projection with SwiGLU behind it, for chains of one step.
pub(super) fn up_swiglu_entry(math: Math, rank: usize) -> Option<&'static str> {
    match (math, rank <= STEP_TERMS) {
        (Math::Bf16, true) => Some("lora_up_swiglu_bf16"),
        (Math::F16, true) => Some("lora_up_swiglu_f16"),
        _ => None,
    }
}

/// A matrix as its strips are dealt to warps: neighbouring ones to a block, which goes down a run of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Walk {
    rows: usize,
    run_rows: usize,
    strip_blocks: usize,
}

impl Walk {
    /// Where whole runs of a stage, whole strips of each part's columns and chains of `terms` terms make up such a
    /// matrix, and all of its operands can be read by 16 bytes.
    pub fn of(
        (rows, terms, math): (usize, usize, Math),
        columns: &[usize],
        operands: &[Region],
        device: &DeviceShape,
    ) -> Option<Walk> {
        let whole = columns.iter().all(|n| n.is_multiple_of(STRIP_COLUMNS));
        let fits = rows.is_multiple_of(STAGE_ROWS)
            && (1..=MOST_TERMS).contains(&terms)
            && by_vectors(terms, math, operands);
        let strips = columns.iter().sum::<usize>() / STRIP_COLUMNS;
        (whole && fits).then(|| Walk::over(rows, strips, device))
    }

    /// The grid that fills the device once, or once at least.
    fn over(rows: usize, strips: usize, device: &DeviceShape) -> Walk {
        let strip_blocks = strips.div_ceil(WARPS);
        let resident = device.multiprocessors as usize * RESIDENT_BLOCKS;
        let runs = (resident / strip_blocks.max(1)).max(1);
        let run_rows = rows.div_ceil(runs).next_multiple_of(STAGE_ROWS);
        Walk {
            rows,
            run_rows: run_rows.max(LEAST_RUN_ROWS),
            strip_blocks,
        }
    }

    /// Its numbers, as the kernels take them.
    fn numbers(&self) -> [Arg; 3] {
        numbers([self.rows, self.run_rows, self.strip_blocks])
    }

    /// The launch over operands, its numbers and those of the kernel; none where there is nothing to do.
    pub fn launch(
        &self,
        entry: &'static str,
        operands: &[Region],
        numbers: impl IntoIterator<Item = Arg>,
    ) -> Option<KernelLaunch> {
        let regions = operands.iter().copied().map(Arg::Region);
        let args = regions.chain(self.numbers()).chain(numbers).collect();
        let blocks = self.rows.div_ceil(self.run_rows) * self.strip_blocks;
        (blocks > 0).then(|| KernelLaunch {
            entry,
            grid: [number(blocks), 1, 1],
            block: [number(WARPS * 32), 1, 1],
            shared_bytes: 0,
            args,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::call::H200;

    #[test]
    fn a_grid_fills_the_device_once() {
        let grid = |rows, columns: usize| {
            let walk = Walk::over(rows, columns / STRIP_COLUMNS, &H200);
            let launch = walk.launch("x", &[], []).expect("a launch");
            (walk.run_rows, launch.grid[0])
        };
        assert_eq!(grid(4096, 6144), (192, 22 * 24));
        assert_eq!(grid(4096, 4096), (128, 32 * 16));
        assert_eq!(grid(4096, 3072), (96, 43 * 12));
        assert_eq!(grid(4096, 1024), (32, 128 * 4));
        assert_eq!(grid(16, 64), (32, 1));
        assert_eq!(Walk::over(0, 4, &H200).launch("x", &[], []), None);
    }
}
