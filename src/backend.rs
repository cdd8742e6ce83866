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

/// A device that runs programs.
pub trait Backend {
    /// The one allocation everything lies in.
    type Arena;
    /// A captured program. It keeps what it refers to alive.
    type Graph;

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
