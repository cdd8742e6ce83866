//! Launches that hash regions of the arena: BLAKE3 of each, in two kernels over all regions.
//!
//! A table in the workspace tells the kernels the regions. A block of the first kernel takes 128 chunks
//! of 1,024 bytes; the second kernel folds the blocks' values of every region that has more than one.

use bytemuck::{Pod, Zeroable};

use super::call::{Arg, CallLaunches, KernelLaunch};
use crate::layout::Region;

/// Bytes that a block of the first kernel takes.
const BLOCK_BYTES: usize = 128 * 1024;
/// Threads of a block of the first kernel, one a chunk, and of the second one at most.
const CHUNK_THREADS: u32 = 128;
const PARENT_THREADS: usize = 512;
/// Bytes of a chaining value and of a digest.
const VALUE_BYTES: usize = blake3::OUT_LEN;
/// The kernels, in the order they are launched.
pub const ENTRIES: [&str; 2] = ["digest_blake3_chunks", "digest_blake3_parents"];
/// Every part of the workspace starts at a multiple of this.
const PART_ALIGNMENT: usize = 256;

/// A region as the kernels see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct Entry {
    /// From the start of the arena.
    offset: u64,
    bytes: u64,
    /// The region's first block in the first kernel's grid.
    first_block: u32,
    blocks: u32,
}

/// What hashes a list of regions.
#[derive(Clone, Debug, PartialEq)]
pub struct DigestPlan {
    /// Bytes to be written at the workspace's start before the launches.
    pub table: Vec<u8>,
    /// Two launches, or one where no region is longer than a block takes, or none for no region.
    pub launches: CallLaunches,
    /// Where in the workspace each region's digest then stands, 32 bytes each.
    pub results: Vec<usize>,
}

/// Where the parts of the workspace start.
struct Parts {
    values: usize,
    digests: usize,
    end: usize,
}

impl Parts {
    fn of(regions: usize, blocks: usize) -> Self {
        let after = |start: usize, bytes: usize| (start + bytes).next_multiple_of(PART_ALIGNMENT);
        let values = after(0, regions * size_of::<Entry>());
        let digests = after(values, blocks * VALUE_BYTES);
        let end = after(digests, regions * VALUE_BYTES);
        Parts {
            values,
            digests,
            end,
        }
    }
}

/// Blocks of the first kernel for a region; an empty region has one, for its empty chunk.
fn blocks_of(region: &Region) -> usize {
    region.bytes.div_ceil(BLOCK_BYTES).max(1)
}

/// Bytes of workspace that hashing `regions`, or any of them, needs.
pub fn workspace_bytes(regions: &[Region]) -> usize {
    Parts::of(regions.len(), regions.iter().map(blocks_of).sum()).end
}

/// Plans the digests of `regions`, in their order.
pub fn plan(regions: &[Region]) -> DigestPlan {
    let mut table = Vec::with_capacity(regions.len() * size_of::<Entry>());
    let (mut first_block, mut longest) = (0, 0);
    for region in regions {
        let blocks = blocks_of(region);
        let entry = Entry {
            offset: region.offset as u64,
            bytes: region.bytes as u64,
            first_block: first_block as u32,
            blocks: blocks as u32,
        };
        table.extend_from_slice(bytemuck::bytes_of(&entry));
        first_block += blocks;
        longest = longest.max(blocks);
    }
    let parts = Parts::of(regions.len(), first_block);
    DigestPlan {
        table,
        launches: CallLaunches {
            launches: launches(regions.len(), (first_block, longest), &parts),
            workspace_bytes: parts.end,
            zeroed_bytes: 0,
        },
        results: (0..regions.len())
            .map(|i| parts.digests + i * VALUE_BYTES)
            .collect(),
    }
}

/// The launches for `blocks` blocks over all regions, the region with most having `longest`.
fn launches(regions: usize, (blocks, longest): (usize, usize), parts: &Parts) -> Vec<KernelLaunch> {
    let arena = Arg::Region(Region {
        offset: 0,
        bytes: 0,
    });
    let at = |offset| Arg::Workspace { offset };
    let (table, values, digests) = (at(0), at(parts.values), at(parts.digests));
    let launch = |entry, (blocks, threads): (usize, u32), args| KernelLaunch {
        entry,
        grid: [blocks as u32, 1, 1],
        block: [threads, 1, 1],
        shared_bytes: 0,
        args,
    };
    let mut launches = Vec::new();
    if regions > 0 {
        let args = vec![arena, table, values, digests, Arg::U32(regions as u32)];
        let size = (blocks, CHUNK_THREADS);
        launches.push(launch(ENTRIES[0], size, args));
    }
    if longest > 1 {
        // The first level of the longest region has half as many merges as the region has values.
        let threads = (longest / 2).next_multiple_of(32).min(PARENT_THREADS);
        let size = (regions, threads as u32);
        let args = vec![table, values, digests];
        launches.push(launch(ENTRIES[1], size, args));
    }
    launches
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(offset: usize, bytes: usize) -> Region {
        Region { offset, bytes }
    }

    fn entries(plan: &DigestPlan) -> Vec<Entry> {
        let entries = plan.table.chunks_exact(size_of::<Entry>());
        entries.map(bytemuck::pod_read_unaligned).collect()
    }

    #[test]
    fn blocks_follow_one_another_and_every_byte_has_one() {
        let sizes = [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, 10 * BLOCK_BYTES, 3];
        let regions: Vec<Region> = sizes.iter().map(|&n| region(4 * n, n)).collect();
        let plan = plan(&regions);
        let entries = entries(&plan);
        let blocks: Vec<u32> = entries.iter().map(|e| e.blocks).collect();
        assert_eq!(blocks, [1, 1, 1, 2, 10, 1]);
        let first: Vec<u32> = entries.iter().map(|e| e.first_block).collect();
        assert_eq!(first, [0, 1, 2, 3, 5, 15]);
        assert_eq!((entries[3].offset, entries[3].bytes), (524_292, 131_073));
        assert_eq!(plan.launches.launches[0].grid[0], 16);
        assert_eq!(plan.launches.launches[1].grid[0], 6);
    }

    #[test]
    fn the_parts_of_the_workspace_lie_apart() {
        let regions: Vec<Region> = (0..100).map(|i| region(0, i << 14)).collect();
        let plan = plan(&regions);
        let total: usize = regions.iter().map(blocks_of).sum();
        let parts = Parts::of(regions.len(), total);
        assert!(plan.table.len() <= parts.values);
        assert!(parts.values + total * 32 <= parts.digests);
        assert_eq!(plan.results[0], parts.digests);
        assert!(plan.results[99] + 32 <= plan.launches.workspace_bytes);
        assert_eq!(plan.launches.workspace_bytes, workspace_bytes(&regions));
        assert!(workspace_bytes(&regions[7..20]) <= workspace_bytes(&regions));
    }

    #[test]
    fn short_regions_need_one_launch_and_none_need_no_launch() {
        assert_eq!(plan(&[region(0, 5)]).launches.launches.len(), 1);
        assert!(plan(&[]).launches.launches.is_empty());
    }
}
