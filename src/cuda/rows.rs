//! What the launches over token rows share: arguments, grids, and how a sum over tokens is dealt to blocks.

use super::call::{Arg, CallLaunches, DeviceShape, KernelLaunch};
use crate::layout::Region;
use crate::num::tree::TokenSum;
use crate::shape::Math;

/// Columns and rows of the blocks that serve a matrix elementwise: 32 × 8 threads.
const TILE: [usize; 2] = [32, 8];

/// The most steps of 8 rows that such a block takes.
const MOST_STEPS: usize = 8;

/// Blocks a multiprocessor below which blocks take fewer steps.
const BLOCKS_A_MULTIPROCESSOR: usize = 16;

/// A count as kernels take it; what does not fit in 32 bits fits in no arena either.
pub(super) fn number(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// Counts as arguments.
pub(super) fn numbers<const N: usize>(counts: [usize; N]) -> [Arg; N] {
    counts.map(|n| Arg::U32(number(n)))
}

/// Regions as arguments.
pub(super) fn regions<const N: usize>(regions: [Region; N]) -> [Arg; N] {
    regions.map(Arg::Region)
}

/// The entry of a stem for the storage of a precision, as `stem_<storage><variant>`.
macro_rules! entry {
    ($math:expr, $stem:literal, $variant:literal) => {
        match $math.storage() {
            $crate::shape::DType::Bf16 => concat!($stem, "_bf16", $variant),
            $crate::shape::DType::F16 => concat!($stem, "_f16", $variant),
            _ => concat!($stem, "_f32", $variant),
        }
    };
}
pub(super) use entry;

/// The entry of an elementwise stem that serves `$width` elements a thread, as [`vector_width`] gives it.
macro_rules! vector_entry {
    ($width:expr, $math:expr, $stem:literal) => {
        match $width {
            1 => entry!($math, $stem, ""),
            4 => concat!($stem, "_f32_quads"),
            _ => entry!($math, $stem, "_octets"),
        }
    };
}
pub(super) use vector_entry;

/// How many elements of a row of `width` elements fill 16 bytes, if all rows of these regions can be read
/// so; else 1. Regions besides those in the storage of `math` hold f32.
pub(super) fn vector_width(width: usize, math: Math, regions: &[Region]) -> usize {
    match by_vectors(width, math, regions) {
        true => 16 / math.storage().size(),
        false => 1,
    }
}

/// Whether rows of `width` elements in the storage of `math` from these regions can be read by 16 bytes.
pub(super) fn by_vectors(width: usize, math: Math, regions: &[Region]) -> bool {
    let row_bytes = width * math.storage().size();
    row_bytes.is_multiple_of(16) && regions.iter().all(|r| r.offset.is_multiple_of(16))
}

/// Whether rows of `width` f32 elements from these regions can be read by 16 bytes.
pub(super) fn aligned(width: usize, regions: &[Region]) -> bool {
    by_vectors(width, Math::F32, regions)
}

/// Whether rows of `width` elements in the storage of `math` from these regions can be read by four elements.
pub(super) fn by_fours(width: usize, math: Math, regions: &[Region]) -> bool {
    let four = 4 * math.storage().size();
    width.is_multiple_of(4) && regions.iter().all(|r| r.offset.is_multiple_of(four))
}

/// One launch without a workspace; none where the grid is empty.
pub(super) fn one(
    entry: &'static str,
    grid: [usize; 2],
    block: [u32; 2],
    args: Vec<Arg>,
) -> CallLaunches {
    if grid.contains(&0) {
        return CallLaunches::default();
    }
    let launch = KernelLaunch {
        entry,
        grid: [number(grid[0]), number(grid[1]), 1],
        block: [block[0], block[1], 1],
        shared_bytes: 0,
        args,
    };
    launch.into()
}

/// An elementwise kernel over `rows` rows of `units` columns or quads of columns; its last argument is
/// the number of steps of 8 rows that a block takes.
pub(super) fn tiles(
    entry: &'static str,
    (rows, units): (usize, usize),
    device: &DeviceShape,
    mut args: Vec<Arg>,
) -> CallLaunches {
    let (across, down) = (units.div_ceil(TILE[0]), rows.div_ceil(TILE[1]));
    let wanted = device.multiprocessors as usize * BLOCKS_A_MULTIPROCESSOR;
    let steps = (across * down / wanted.max(1)).clamp(1, MOST_STEPS);
    let steps = 1 << steps.ilog2();
    args.push(Arg::U32(number(steps)));
    let grid = [down.div_ceil(steps), across];
    one(entry, grid, [number(TILE[0]), number(TILE[1])], args)
}

/// Clears a sum over no tokens.
pub(super) fn no_tokens(outputs: &[Region]) -> CallLaunches {
    let clear = |&region: &Region| {
        let n = region.bytes / 4;
        let mut args = vec![Arg::Region(region)];
        args.extend(numbers([n]));
        one("bias_grad_f32_none", [n.div_ceil(256), 1], [256, 1], args).launches
    };
    CallLaunches {
        launches: outputs.iter().flat_map(clear).collect(),
        ..CallLaunches::default()
    }
}

/// A sum over at least one token, as kernels take it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub tokens: usize,
    pub grain: usize,
    pub piece: usize,
}

impl Cut {
    /// The same sum. Whole grains of 2^k whole pieces become one grain: in a balanced tree, aligned groups
    /// of 2^k leaves are subtrees.
    pub fn new(sum: &TokenSum) -> Self {
        let tokens = sum.tokens.max(1);
        let grain = sum.grain.clamp(1, tokens);
        let piece = sum.piece.clamp(1, grain);
        let flat = grain.is_multiple_of(piece) && (grain / piece).is_power_of_two();
        Cut {
            tokens,
            grain: if flat { tokens } else { grain },
            piece,
        }
    }

    pub fn grains(&self) -> usize {
        self.tokens.div_ceil(self.grain)
    }

    /// Pieces of a grain; the last grain may have fewer.
    pub fn pieces(&self) -> usize {
        self.grain.div_ceil(self.piece)
    }

    pub fn numbers(&self) -> [Arg; 3] {
        numbers([self.tokens, self.grain, self.piece])
    }
}

/// The workspace of a token sum: arrival counters, then partials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Workspace {
    /// Counters of 4 bytes.
    pub counters: usize,
    /// Partials of 4 bytes.
    pub partials: usize,
}

impl Workspace {
    fn partials_offset(&self) -> usize {
        (self.counters * 4).next_multiple_of(16)
    }

    /// The addresses of both.
    pub fn args(&self) -> [Arg; 2] {
        [0, self.partials_offset()].map(|offset| Arg::Workspace { offset })
    }

    /// The launches with this workspace and, for each, `shared_bytes` of shared memory.
    pub fn with(&self, mut launches: CallLaunches, shared_bytes: usize) -> CallLaunches {
        for launch in &mut launches.launches {
            launch.shared_bytes = number(shared_bytes);
        }
        // What follows the counters is placed by its distance from them and keeps its alignment only so.
        launches.zeroed_bytes = self.partials_offset();
        launches.workspace_bytes = self.partials_offset() + self.partials * 4;
        launches
    }
}

/// Dynamic shared memory of a block that has a multiprocessor to itself; a little is left for static arrays.
pub(super) fn shared_of_one(device: &DeviceShape) -> usize {
    (device.shared_bytes_per_block as usize).saturating_sub(1024)
}

/// Dynamic shared memory with which two blocks share a multiprocessor; each reserves 1 KiB besides.
pub(super) fn shared_of_two(device: &DeviceShape) -> usize {
    (device.shared_bytes_per_block as usize / 2).saturating_sub(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: DeviceShape = DeviceShape {
        multiprocessors: 132,
        shared_bytes_per_block: 232_448,
        warpgroups: true,
    };

    fn cut(tokens: usize, grain: usize, piece: usize) -> Cut {
        Cut::new(&TokenSum {
            tokens,
            grain,
            piece,
        })
    }

    #[test]
    fn grains_of_a_power_of_two_pieces_become_one() {
        assert_eq!(cut(8192, 1024, 32).grains(), 1);
        assert_eq!(cut(8192, 1024, 32).pieces(), 256);
        // Three pieces a grain, or a ragged last piece, need a tree of their own.
        assert_eq!(cut(300, 96, 32).grains(), 4);
        assert_eq!(cut(300, 100, 32).grains(), 3);
        assert_eq!(cut(300, 64, 32).pieces(), 10);
    }

    /// The flat sum is the sum in two levels, bit for bit.
    #[test]
    fn a_flat_cut_has_the_bits_of_the_grains() {
        for (tokens, grain, piece) in [(100, 8, 4), (77, 16, 16), (64, 4, 1), (5, 100, 3)] {
            let sum = TokenSum {
                tokens,
                grain,
                piece,
            };
            let flat = Cut::new(&sum);
            let chain = |range: std::ops::Range<usize>| {
                range.fold(0.0, |acc: f32, t| acc + 1.0 / (t as f32 + 0.7))
            };
            let again = TokenSum {
                tokens: flat.tokens,
                grain: flat.grain,
                piece: flat.piece,
            };
            assert_eq!(sum.sum(chain).to_bits(), again.sum(chain).to_bits());
        }
    }

    #[test]
    fn large_matrices_take_more_steps_a_block() {
        let grid = |rows, units| {
            let launches = tiles("x", (rows, units), &DEVICE, vec![]).launches;
            (launches[0].grid, launches[0].args[0])
        };
        assert_eq!(grid(1024, 96), ([128, 3, 1], Arg::U32(1)));
        assert_eq!(grid(8192, 512), ([256, 16, 1], Arg::U32(4)));
        assert!(tiles("x", (0, 5), &DEVICE, vec![]).launches.is_empty());
    }

    #[test]
    fn counters_come_first_and_partials_are_aligned() {
        let workspace = Workspace {
            counters: 3,
            partials: 10,
        };
        assert_eq!(workspace.args()[1], Arg::Workspace { offset: 16 });
        let launches = workspace.with(CallLaunches::default(), 0);
        assert_eq!((launches.zeroed_bytes, launches.workspace_bytes), (16, 56));
    }

    #[test]
    fn alignment_is_that_of_every_region_and_of_the_rows() {
        let at = |offset| Region { offset, bytes: 64 };
        assert!(aligned(8, &[at(0), at(32)]));
        assert!(!aligned(8, &[at(0), at(4)]));
        assert!(!aligned(6, &[at(0)]));
        assert_eq!(vector_width(8, Math::F32, &[at(16)]), 4);
        assert_eq!(vector_width(8, Math::Bf16, &[at(16)]), 8);
        assert_eq!(vector_width(12, Math::F16, &[at(16)]), 1);
        assert_eq!(vector_width(8, Math::F16, &[at(8)]), 1);
    }
}
