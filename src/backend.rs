//! What a backend does: hold one arena, run calls in it, capture calls as a graph and launch it.
//!
//! The engine is generic over this trait and owns every decision; a backend owns none. A backend
//! delivers the bits that the contract names, whatever kernels it uses for them.

use crate::error::{CaptureError, DeviceError, GuardError};
use crate::layout::{Layout, PlacedCall, Region};

/// Which arena something belongs to; two arenas of a process never share an identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ArenaId(pub u64);

/// What a backend says about itself; shown to people and written beside manifests, never hashed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// `cpu` or `cuda:N`.
    pub device: String,
    /// The model of the device and how it is used.
    pub description: String,
}

/// How one call is executed: a line of the manifest's execution section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Execution {
    /// The call's index in its program.
    pub call: usize,
    /// The kernel or routine that serves it.
    pub kernel: String,
}

/// Memory that an arena holds on its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaBytes {
    /// Bytes of the planned slots.
    pub planned: usize,
    /// Bytes behind them that kernels and libraries work in.
    pub workspace: usize,
}

/// A device that runs programs.
pub trait Backend {
    /// The one allocation everything lies in.
    type Arena;
    /// A captured program. It keeps what it refers to alive.
    type Graph;
    /// A captured digest of some regions. It keeps what it refers to alive.
    type DigestGraph;

    /// What this backend runs on.
    fn info(&self) -> DeviceInfo;

    /// Allocates the arena of a layout, and whatever workspace `calls` need; every byte is zero.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] with the bytes that were asked for.
    fn allocate(&self, layout: &Layout, calls: &[PlacedCall]) -> Result<Self::Arena, DeviceError>;

    /// The identity of an arena.
    fn arena_id(&self, arena: &Self::Arena) -> ArenaId;

    /// Runs one call and returns when later reads see its result.
    ///
    /// # Errors
    /// A fault of the device, or operands that do not fit.
    fn launch(&self, arena: &mut Self::Arena, call: &PlacedCall) -> Result<(), DeviceError>;

    /// Turns calls into a graph without running them.
    ///
    /// # Errors
    /// Calls that cannot be captured; whatever happens, capture has ended when this returns.
    fn capture(
        &self,
        arena: &mut Self::Arena,
        calls: &[PlacedCall],
    ) -> Result<Self::Graph, CaptureError>;

    /// Whether a graph still belongs to this arena and to the kernels it was captured with.
    ///
    /// # Errors
    /// What has changed since capture.
    fn check_graph(&self, arena: &Self::Arena, graph: &Self::Graph) -> Result<(), GuardError>;

    /// Runs a graph once.
    ///
    /// # Errors
    /// A fault of the device.
    fn launch_graph(
        &self,
        arena: &mut Self::Arena,
        graph: &mut Self::Graph,
    ) -> Result<(), DeviceError>;

    /// Runs a graph once, then `launches` times more back to back; milliseconds that those took by the
    /// device's own clock, `None` where it has none. The state advances by every one of these runs.
    ///
    /// # Errors
    /// A fault of the device.
    fn time_graph(
        &self,
        arena: &mut Self::Arena,
        graph: &mut Self::Graph,
        launches: u32,
    ) -> Result<Option<f32>, DeviceError> {
        (0..=launches).try_for_each(|_| self.launch_graph(arena, graph))?;
        Ok(None)
    }

    /// Nodes of a graph: what the device starts when it is launched.
    fn graph_nodes(&self, graph: &Self::Graph) -> usize;

    /// Memory that an arena holds on the device.
    fn arena_bytes(&self, arena: &Self::Arena) -> ArenaBytes;

    /// How each call is executed.
    fn executions(&self, calls: &[PlacedCall]) -> Vec<Execution>;

    /// Writes bytes into a region.
    ///
    /// # Errors
    /// [`DeviceError::TransferSize`] unless the lengths are equal; a fault of the device.
    fn write(
        &self,
        arena: &mut Self::Arena,
        region: Region,
        bytes: &[u8],
    ) -> Result<(), DeviceError>;

    /// Sets every byte of a region, where the region is.
    ///
    /// # Errors
    /// A region outside the arena; a fault of the device.
    fn fill(&self, arena: &mut Self::Arena, region: Region, byte: u8) -> Result<(), DeviceError>;

    /// Reads a region's bytes.
    ///
    /// # Errors
    /// [`DeviceError::TransferSize`] unless the lengths are equal; a fault of the device.
    fn read(
        &self,
        arena: &Self::Arena,
        region: Region,
        bytes: &mut [u8],
    ) -> Result<(), DeviceError>;

    /// BLAKE3 of each region's bytes.
    ///
    /// # Errors
    /// A region outside the arena; a fault of the device.
    fn digest(
        &self,
        arena: &Self::Arena,
        regions: &[Region],
    ) -> Result<Vec<blake3::Hash>, DeviceError>;

    /// Turns the digest of some regions into a graph of its own, without running it.
    ///
    /// # Errors
    /// A region outside the arena; what the backend cannot capture.
    fn capture_digest(
        &self,
        arena: &mut Self::Arena,
        regions: &[Region],
    ) -> Result<Self::DigestGraph, CaptureError>;

    /// Whether a captured digest still belongs to this arena, these regions and the kernels it was
    /// captured with.
    ///
    /// # Errors
    /// What has changed since capture; a change of the regions is [`GuardError::DigestRegions`].
    fn check_digest(
        &self,
        arena: &Self::Arena,
        graph: &Self::DigestGraph,
        regions: &[Region],
    ) -> Result<(), GuardError>;

    /// Runs a captured digest: BLAKE3 of each region's bytes, in the regions' order.
    ///
    /// # Errors
    /// A fault of the device.
    fn launch_digest(
        &self,
        arena: &mut Self::Arena,
        graph: &mut Self::DigestGraph,
    ) -> Result<Vec<blake3::Hash>, DeviceError>;
}

/// Checks that a transfer of `found` bytes fills its region.
///
/// # Errors
/// [`DeviceError::TransferSize`] when it does not.
pub(crate) fn same_length(region: Region, found: usize) -> Result<(), DeviceError> {
    match region.bytes == found {
        true => Ok(()),
        false => Err(DeviceError::TransferSize {
            expected: region.bytes,
            found,
        }),
    }
}

/// Checks that the regions to be digested are those of a captured digest.
///
/// # Errors
/// [`GuardError::DigestRegions`] with the first that differs, or with both counts.
pub(crate) fn same_regions(then: &[Region], now: &[Region]) -> Result<(), GuardError> {
    if then == now {
        return Ok(());
    }
    let text = |regions: &[Region], index: Option<usize>| match index {
        None => format!("{} regions", regions.len()),
        Some(i) => format!("region {i} at {}..{}", regions[i].offset, regions[i].end()),
    };
    let differs = match then.len() == now.len() {
        true => then.iter().zip(now).position(|(a, b)| a != b),
        false => None,
    };
    Err(GuardError::DigestRegions {
        expected: text(then, differs),
        found: text(now, differs),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_that_does_not_fill_its_region_is_refused() {
        let region = Region {
            offset: 8,
            bytes: 4,
        };
        assert_eq!(same_length(region, 4), Ok(()));
        let (expected, found) = (4, 5);
        assert_eq!(
            same_length(region, 5),
            Err(DeviceError::TransferSize { expected, found })
        );
    }
}
