//! A copy of everything that survives a step, to go back to.

use super::step::Progress;
use super::window::Window;
use crate::backend::Backend;
use crate::error::DeviceError;
use crate::layout::{Layout, Region};

/// The persistent bytes of an arena and the run's counters at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    bytes: Vec<u8>,
    pub progress: Progress,
    /// The open accumulation window, whose partial sums are among the bytes.
    pub window: Option<Window>,
}

impl Snapshot {
    /// Copies the persistent part of the arena.
    ///
    /// # Errors
    /// A fault of the device.
    pub fn take<B: Backend>(
        backend: &B,
        arena: &B::Arena,
        layout: &Layout,
        (progress, window): (Progress, Option<Window>),
    ) -> Result<Self, DeviceError> {
        let region = persistent(layout);
        let mut bytes = vec![0; region.bytes];
        backend.read(arena, region, &mut bytes)?;
        Ok(Snapshot {
            bytes,
            progress,
            window,
        })
    }

    /// Writes the copy back.
    ///
    /// # Errors
    /// A fault of the device; a layout of another size.
    pub fn restore<B: Backend>(
        &self,
        backend: &B,
        arena: &mut B::Arena,
        layout: &Layout,
    ) -> Result<(), DeviceError> {
        backend.write(arena, persistent(layout), &self.bytes)
    }

    /// The bytes of a region inside the persistent part.
    pub fn region(&self, region: Region) -> Option<&[u8]> {
        self.bytes.get(region.offset..region.end())
    }

    /// The bytes of a region inside the persistent part, to be changed before a restore.
    pub fn region_mut(&mut self, region: Region) -> Option<&mut [u8]> {
        self.bytes.get_mut(region.offset..region.end())
    }
}

fn persistent(layout: &Layout) -> Region {
    Region {
        offset: 0,
        bytes: layout.persistent_bytes(),
    }
}
