//! The device's arena: one allocation for the planned slots and, behind them, the workspace.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys;

use super::device::Device;
use crate::backend::{ArenaBytes, ArenaId, same_length};
use crate::error::DeviceError;
use crate::layout::Region;

/// Bytes of the pinned buffer through which all transfers to the device go.
const STAGING_BYTES: usize = 1 << 22;

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// The allocation. A graph keeps it alive through its `Arc`.
pub(super) struct Memory {
    device: Arc<Device>,
    pub(super) base: sys::CUdeviceptr,
    pub(super) bytes: usize,
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = self.device.bind();
        let _ = self.device.synchronize();
        // SAFETY: `base` came from cuMemAlloc, and whatever is issued to the stream has ended.
        let _ = unsafe { sys::cuMemFree_v2(self.base) };
    }
}

/// The memory of one plan on one device.
pub struct CudaArena {
    id: ArenaId,
    pub(super) memory: Arc<Memory>,
    /// Where the arrival counters, the partials and the library's own workspace start.
    parts: [usize; 3],
    workspace: [usize; 3],
    staging: RefCell<Staging>,
}

impl CudaArena {
    /// An arena of zeros for the planned slots and, behind them, `workspace` bytes of arrival counters,
    /// of partials, and for the matrix library.
    ///
    /// # Errors
    /// [`DeviceError::DeviceMemory`] with what was asked for and what is free.
    pub fn zeroed(
        device: &Arc<Device>,
        planned_bytes: usize,
        workspace: [usize; 3],
    ) -> Result<Self, DeviceError> {
        device.bind()?;
        let mut bytes = planned_bytes.next_multiple_of(256);
        let parts = workspace.map(|part| {
            let start = bytes;
            bytes = (bytes + part).next_multiple_of(256);
            start
        });
        let bytes = bytes.max(256);
        let (free_bytes, total_bytes) = device.memory()?;
        let no_room = || DeviceError::DeviceMemory {
            device: device.label(),
            needed_bytes: bytes,
            free_bytes,
            total_bytes,
        };
        if bytes > free_bytes {
            return Err(no_room());
        }
        let mut base = 0;
        // SAFETY: `base` outlives the call; `Memory` frees it.
        let status = unsafe { sys::cuMemAlloc_v2(&mut base, bytes) };
        if status == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(no_room());
        }
        device.check("cuMemAlloc", status)?;
        let memory = Arc::new(Memory {
            device: device.clone(),
            base,
            bytes,
        });
        // SAFETY: the range is the allocation just made.
        let status = unsafe { sys::cuMemsetD8Async(base, 0, bytes, device.stream()) };
        device.check("cuMemsetD8Async", status)?;
        Ok(CudaArena {
            id: ArenaId(NEXT_ID.fetch_add(1, Ordering::Relaxed)),
            memory,
            parts,
            workspace,
            staging: RefCell::new(Staging::new(device.clone())?),
        })
    }

    /// The arena's identity.
    pub fn id(&self) -> ArenaId {
        self.id
    }

    /// Bytes of the slots and of everything behind them.
    pub fn bytes(&self) -> ArenaBytes {
        ArenaBytes {
            planned: self.parts[0],
            workspace: self.memory.bytes - self.parts[0],
        }
    }

    /// Issues a copy from one region to another of the same size.
    ///
    /// # Errors
    /// Regions of different sizes or outside the arena; what the driver says.
    pub(super) fn copy(&self, from: Region, to: Region) -> Result<(), DeviceError> {
        same_length(to, from.bytes)?;
        let (source, target) = (self.address(from)?, self.address(to)?);
        let device = &self.memory.device;
        // SAFETY: both ranges lie in the allocation, which the caller holds, and have the same length.
        let status =
            unsafe { sys::cuMemcpyDtoDAsync_v2(target, source, from.bytes, device.stream()) };
        device.check("cuMemcpyDtoDAsync", status)
    }

    /// A counter in the zeroed part of the workspace.
    pub(super) fn counter_region(&self, offset: usize) -> Region {
        Region {
            offset: self.parts[0] + offset,
            bytes: 0,
        }
    }

    /// Bytes among the partials.
    pub(super) fn workspace_region(&self, offset: usize, bytes: usize) -> Region {
        Region {
            offset: self.parts[1] + offset,
            bytes,
        }
    }

    /// All partials.
    pub(super) fn partials(&self) -> Region {
        self.workspace_region(0, self.workspace[1])
    }

    /// The library's own workspace.
    pub(super) fn library_workspace(&self) -> Region {
        Region {
            offset: self.parts[2],
            bytes: self.workspace[2],
        }
    }

    /// The device address of a region.
    ///
    /// # Errors
    /// [`DeviceError::OutOfArena`] when it does not lie inside.
    pub(super) fn address(&self, region: Region) -> Result<sys::CUdeviceptr, DeviceError> {
        match region.end() <= self.memory.bytes {
            true => Ok(self.memory.base + region.offset as u64),
            false => Err(DeviceError::OutOfArena {
                offset: region.offset,
                end: region.end(),
                arena_bytes: self.memory.bytes,
            }),
        }
    }

    /// Copies bytes to the device, ordered after everything issued before.
    ///
    /// # Errors
    /// A region outside the arena; what the driver says.
    pub fn write(&self, region: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        let address = self.address(region)?;
        self.staging.borrow_mut().send(address, bytes)
    }

    /// Copies bytes from the device after everything issued before has ended.
    ///
    /// # Errors
    /// A region outside the arena; what the driver says.
    pub fn read(&self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let address = self.address(region)?;
        let device = &self.memory.device;
        device.bind()?;
        // SAFETY: the region lies in the allocation, and `bytes` outlives the copy, which has ended
        // when the stream is synchronized below.
        let status = unsafe {
            sys::cuMemcpyDtoHAsync_v2(
                bytes.as_mut_ptr().cast(),
                address,
                bytes.len(),
                device.stream(),
            )
        };
        device.check("cuMemcpyDtoHAsync", status)?;
        device.synchronize()
    }
}

/// Pinned memory whose halves are used in turn; a half is written again only after its copy has ended.
struct Staging {
    device: Arc<Device>,
    host: *mut u8,
    halves: [sys::CUevent; 2],
    next: usize,
}

// SAFETY: the pointer is to pinned memory that only this value uses.
unsafe impl Send for Staging {}

impl Staging {
    fn new(device: Arc<Device>) -> Result<Self, DeviceError> {
        let mut host = std::ptr::null_mut();
        // SAFETY: `host` outlives the call; `Drop` frees it.
        let status = unsafe { sys::cuMemHostAlloc(&mut host, STAGING_BYTES, 0) };
        device.check("cuMemHostAlloc", status)?;
        let mut halves = [std::ptr::null_mut(); 2];
        for event in &mut halves {
            let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
            // SAFETY: `event` outlives the call; `Drop` destroys it.
            device.check("cuEventCreate", unsafe { sys::cuEventCreate(event, flags) })?;
        }
        Ok(Staging {
            device,
            host: host.cast(),
            halves,
            next: 0,
        })
    }

    fn send(&mut self, mut address: sys::CUdeviceptr, bytes: &[u8]) -> Result<(), DeviceError> {
        const HALF: usize = STAGING_BYTES / 2;
        let device = self.device.clone();
        device.bind()?;
        for part in bytes.chunks(HALF) {
            let event = self.halves[self.next];
            // SAFETY: the event was created in `new`; one that was never recorded counts as done.
            device.check("cuEventSynchronize", unsafe {
                sys::cuEventSynchronize(event)
            })?;
            // SAFETY: the half lies inside the pinned buffer, holds at least `part.len()` bytes, and
            // its last copy has ended.
            let half = unsafe {
                let half = self.host.add(self.next * HALF);
                std::ptr::copy_nonoverlapping(part.as_ptr(), half, part.len());
                half
            };
            // SAFETY: the caller has checked that the address range lies in the arena.
            let status = unsafe {
                sys::cuMemcpyHtoDAsync_v2(address, half.cast(), part.len(), device.stream())
            };
            device.check("cuMemcpyHtoDAsync", status)?;
            // SAFETY: event and stream live as long as `self` and its device.
            device.check("cuEventRecord", unsafe {
                sys::cuEventRecord(event, device.stream())
            })?;
            address += part.len() as u64;
            self.next = 1 - self.next;
        }
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let _ = self.device.bind();
        let _ = self.device.synchronize();
        // SAFETY: the copies have ended; events and buffer were made in `new`.
        unsafe {
            for event in self.halves {
                let _ = sys::cuEventDestroy_v2(event);
            }
            let _ = sys::cuMemFreeHost(self.host.cast());
        }
    }
}
