//! A kernel launch as data: what an op asks for, before anything touches a device.
//!
//! Every op's file turns a placed call into launches; one place executes them. So a launch can be
//! listed in the manifest, checked against a graph's nodes, and tested without a GPU.

use crate::layout::Region;

/// One argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    /// The address of a region of the arena.
    Region(Region),
    /// The address of a byte of the workspace behind the planned arena.
    Workspace { offset: usize },
    /// A 32-bit unsigned integer.
    U32(u32),
    /// A binary32 number.
    F32(f32),
    /// A matrix of 16-bit elements as the copy engine takes it.
    Matrix(Matrix),
}

/// A matrix of 16-bit elements in a region, row by row, and the boxes of it that the copy engine moves: they have
/// [`BOX_COLUMNS`], stand in shared memory with a swizzle over 128 bytes, and what of one lies beyond the matrix is zeros.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Matrix {
    pub region: Region,
    pub rows: u32,
    pub columns: u32,
    pub box_rows: u32,
}

/// Columns of a box: the 128 bytes of the swizzle.
pub const BOX_COLUMNS: u32 = 64;

/// One kernel launch.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelLaunch {
    /// The kernel's entry; its file is the longest stem of `ptx/` that the entry starts with.
    pub entry: &'static str,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Dynamic shared memory.
    pub shared_bytes: u32,
    pub args: Vec<Arg>,
}

impl KernelLaunch {
    /// The launch as the manifest's execution section lists it.
    pub fn describe(&self) -> String {
        let ([x, y, z], [bx, by, bz]) = (self.grid, self.block);
        let (entry, shared) = (self.entry, self.shared_bytes);
        format!("{entry} <<<{x},{y},{z} x {bx},{by},{bz}, {shared}>>>")
    }
}

/// The launches of one call and the workspace they need.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CallLaunches {
    pub launches: Vec<KernelLaunch>,
    /// Bytes of workspace; calls run one after another and share it.
    pub workspace_bytes: usize,
    /// Bytes at the workspace's start that must be zero before the first launch and are zero again
    /// after the last: arrival counters.
    pub zeroed_bytes: usize,
}

impl CallLaunches {
    /// The launches as the manifest's execution section lists them.
    pub fn describe(&self) -> String {
        let texts: Vec<String> = self.launches.iter().map(KernelLaunch::describe).collect();
        texts.join(" + ")
    }
}

/// One launch without a workspace.
impl From<KernelLaunch> for CallLaunches {
    fn from(launch: KernelLaunch) -> Self {
        CallLaunches {
            launches: vec![launch],
            ..CallLaunches::default()
        }
    }
}

/// What of a device decides a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceShape {
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// The most dynamic shared memory a block may ask for.
    pub shared_bytes_per_block: u32,
    /// Whether it has the instructions of Hopper's warpgroups, which no other architecture takes.
    pub warpgroups: bool,
}

/// What tests plan launches for.
#[cfg(test)]
pub(super) const H200: DeviceShape = DeviceShape {
    multiprocessors: 132,
    shared_bytes_per_block: 232_448,
    warpgroups: true,
};
