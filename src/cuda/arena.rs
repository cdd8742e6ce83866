//! The device's arena: one allocation for the planned slots and, behind them, the workspace.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys;
use rayon::prelude::*;

use super::device::Device;
use super::exclusive;
use super::lanes::{LANES, Lane};
use crate::backend::{ArenaBytes, ArenaId, same_length};
use crate::error::DeviceError;
use crate::layout::{ALIGNMENT, Region};

/// Bytes of one half of the pinned buffer through which all transfers go.
const HALF: usize = 1 << 22;

/// Bytes that one thread copies between a pinned half and other memory; a half keeps several busy, and
/// what a step writes and reads is too small for more than one.
const PIECE: usize = 1 << 18;

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
        let _aside = exclusive::aside();
        // SAFETY: `base` came from cuMemAlloc, and whatever is issued to the stream has ended.
        let _ = unsafe { sys::cuMemFree_v2(self.base) };
    }
}

/// The memory of one plan on one device.
pub struct CudaArena {
    id: ArenaId,
    pub(super) memory: Arc<Memory>,
    /// Bytes of the slots.
    planned: usize,
    /// Each lane's arrival counters, partials, and the library's own workspace.
    workspaces: [[Region; 3]; LANES],
    staging: RefCell<Staging>,
}

impl CudaArena {
    /// An arena of zeros for the planned slots and, behind them, so many bytes of arrival counters, of partials, and
    /// for the matrix library, for each lane its own.
    ///
    /// # Errors
    /// [`DeviceError::DeviceMemory`] with what was asked for and what is free.
    pub fn zeroed(
        device: &Arc<Device>,
        planned_bytes: usize,
        workspaces: [[usize; 3]; LANES],
    ) -> Result<Self, DeviceError> {
        device.bind()?;
        let planned = planned_bytes.next_multiple_of(ALIGNMENT);
        let mut end = planned;
        let mut place = |bytes: usize| {
            let offset = end;
            end = (end + bytes).next_multiple_of(ALIGNMENT);
            Region { offset, bytes }
        };
        let workspaces = workspaces.map(|parts| parts.map(&mut place));
        let bytes = end;
        let bytes = bytes.max(ALIGNMENT);
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
        let _aside = exclusive::aside();
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
            planned,
            workspaces,
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
            planned: self.planned,
            workspace: self.memory.bytes - self.planned,
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

    /// A counter in the zeroed part of a lane's workspace.
    pub(super) fn counter_region(&self, lane: Lane, offset: usize) -> Region {
        let [counters, _, _] = self.workspaces[lane as usize];
        Region {
            offset: counters.offset + offset,
            bytes: 0,
        }
    }

    /// Bytes among a lane's partials.
    pub(super) fn workspace_region(&self, lane: Lane, offset: usize, bytes: usize) -> Region {
        Region {
            offset: self.partials(lane).offset + offset,
            bytes,
        }
    }

    /// All partials of a lane.
    pub(super) fn partials(&self, lane: Lane) -> Region {
        self.workspaces[lane as usize][1]
    }

    /// The library's own workspace for a lane.
    pub(super) fn library_workspace(&self, lane: Lane) -> Region {
        self.workspaces[lane as usize][2]
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
        self.staging.borrow_mut().receive(address, bytes)
    }

    /// Sets every byte of a region on the device, ordered after everything issued before.
    ///
    /// # Errors
    /// A region outside the arena; what the driver says.
    pub fn fill(&self, region: Region, byte: u8) -> Result<(), DeviceError> {
        let address = self.address(region)?;
        let device = &self.memory.device;
        device.bind()?;
        // The driver takes no empty range.
        if region.bytes == 0 {
            return Ok(());
        }
        // SAFETY: the region lies in the allocation.
        let status = unsafe { sys::cuMemsetD8Async(address, byte, region.bytes, device.stream()) };
        device.check("cuMemsetD8Async", status)
    }
}

/// Host memory that the device reads and writes by itself.
pub(super) struct Pinned {
    device: Arc<Device>,
    host: *mut u8,
    bytes: usize,
}

// SAFETY: the pointer is to pinned memory that only this value and copies issued through it use.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Pinned memory that starts with `bytes`.
    pub(super) fn holding(device: &Arc<Device>, bytes: &[u8]) -> Result<Self, DeviceError> {
        device.bind()?;
        let mut host = std::ptr::null_mut();
        let _aside = exclusive::aside();
        // SAFETY: `host` outlives the call; `Drop` frees it. The driver takes no empty allocation.
        let status = unsafe { sys::cuMemHostAlloc(&mut host, bytes.len().max(1), 0) };
        device.check("cuMemHostAlloc", status)?;
        // SAFETY: the allocation was just made with that many bytes, and nothing else knows it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), host.cast(), bytes.len()) };
        Ok(Pinned {
            device: device.clone(),
            host: host.cast(),
            bytes: bytes.len(),
        })
    }

    /// Issues a copy of all bytes to a region of their length.
    pub(super) fn send(&self, arena: &CudaArena, region: Region) -> Result<(), DeviceError> {
        self.fits(region)?;
        let (device, address) = (&self.device, arena.address(region)?);
        // SAFETY: source and target hold `bytes` bytes each, by the checks above; the buffer is never
        // written after it was made, except by copies of this stream.
        let status = unsafe {
            sys::cuMemcpyHtoDAsync_v2(address, self.host.cast(), self.bytes, device.stream())
        };
        device.check("cuMemcpyHtoDAsync", status)
    }

    /// Issues a copy of a region over all bytes.
    pub(super) fn receive(&self, arena: &CudaArena, region: Region) -> Result<(), DeviceError> {
        self.fits(region)?;
        let (device, address) = (&self.device, arena.address(region)?);
        // SAFETY: as for `send`; nobody reads the buffer before the stream is synchronized.
        let status = unsafe {
            sys::cuMemcpyDtoHAsync_v2(self.host.cast(), address, self.bytes, device.stream())
        };
        device.check("cuMemcpyDtoHAsync", status)
    }

    /// What the buffer holds once everything issued has ended.
    pub(super) fn settled(&self) -> Result<Vec<u8>, DeviceError> {
        self.device.bind()?;
        self.device.synchronize()?;
        // SAFETY: no copy is under way any more, and the allocation has that many bytes.
        Ok(unsafe { std::slice::from_raw_parts(self.host, self.bytes) }.to_vec())
    }

    fn fits(&self, region: Region) -> Result<(), DeviceError> {
        crate::backend::same_length(region, self.bytes)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.device.bind();
        let _ = self.device.synchronize();
        let _aside = exclusive::aside();
        // SAFETY: the copies have ended, and the buffer was allocated in `holding`.
        let _ = unsafe { sys::cuMemFreeHost(self.host.cast()) };
    }
}

/// A pinned buffer whose halves are used in turn; a half is touched again only after its copy has ended.
struct Staging {
    pinned: Pinned,
    ended: [sys::CUevent; 2],
    next: usize,
}

// SAFETY: events may be used from any thread, and the buffer may be sent.
unsafe impl Send for Staging {}

impl Staging {
    fn new(device: Arc<Device>) -> Result<Self, DeviceError> {
        let mut staging = Staging {
            pinned: Pinned::holding(&device, &vec![0; 2 * HALF])?,
            ended: [std::ptr::null_mut(); 2],
            next: 0,
        };
        for event in &mut staging.ended {
            let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
            // SAFETY: `event` outlives the call; `Drop` destroys it.
            device.check("cuEventCreate", unsafe { sys::cuEventCreate(event, flags) })?;
        }
        Ok(staging)
    }

    /// The next half, whose last copy has ended, and its event.
    fn turn(&mut self) -> Result<(*mut u8, sys::CUevent), DeviceError> {
        let (index, device) = (self.next, &self.pinned.device);
        // SAFETY: the event was created in `new`; one that was never recorded counts as done.
        device.check("cuEventSynchronize", unsafe {
            sys::cuEventSynchronize(self.ended[index])
        })?;
        self.next = 1 - index;
        // SAFETY: the buffer has two halves.
        let half = unsafe { self.pinned.host.add(index * HALF) };
        Ok((half, self.ended[index]))
    }

    fn send(&mut self, mut address: sys::CUdeviceptr, bytes: &[u8]) -> Result<(), DeviceError> {
        self.pinned.device.bind()?;
        for part in bytes.chunks(HALF) {
            let (half, ended) = self.turn()?;
            // SAFETY: the half lies inside the pinned buffer, holds at least `part.len()` bytes, and
            // its last copy has ended.
            copy(
                unsafe { std::slice::from_raw_parts_mut(half, part.len()) },
                part,
            );
            let device = &self.pinned.device;
            // SAFETY: the caller has checked that the address range lies in the arena.
            let status = unsafe {
                sys::cuMemcpyHtoDAsync_v2(address, half.cast(), part.len(), device.stream())
            };
            device.check("cuMemcpyHtoDAsync", status)?;
            // SAFETY: event and stream live as long as `self` and its device.
            device.check("cuEventRecord", unsafe {
                sys::cuEventRecord(ended, device.stream())
            })?;
            address += part.len() as u64;
        }
        Ok(())
    }

    /// While one half is copied out, the device fills the other.
    fn receive(
        &mut self,
        mut address: sys::CUdeviceptr,
        bytes: &mut [u8],
    ) -> Result<(), DeviceError> {
        self.pinned.device.bind()?;
        let mut under_way: Option<(&mut [u8], *mut u8, sys::CUevent)> = None;
        for part in bytes.chunks_mut(HALF) {
            let (half, ended) = self.turn()?;
            let device = &self.pinned.device;
            // SAFETY: the caller has checked that the address range lies in the arena; the half holds
            // at least `part.len()` bytes, and it was copied out before its turn came again.
            let status = unsafe {
                sys::cuMemcpyDtoHAsync_v2(half.cast(), address, part.len(), device.stream())
            };
            device.check("cuMemcpyDtoHAsync", status)?;
            // SAFETY: event and stream live as long as `self` and its device.
            device.check("cuEventRecord", unsafe {
                sys::cuEventRecord(ended, device.stream())
            })?;
            address += part.len() as u64;
            if let Some(earlier) = under_way.replace((part, half, ended)) {
                self.take(earlier)?;
            }
        }
        under_way.map_or(Ok(()), |last| self.take(last))
    }

    /// Waits for a copy into a half and copies it out.
    fn take(
        &self,
        (part, half, ended): (&mut [u8], *mut u8, sys::CUevent),
    ) -> Result<(), DeviceError> {
        let device = &self.pinned.device;
        // SAFETY: the event lives as long as `self` and was recorded behind the copy.
        let status = unsafe { sys::cuEventSynchronize(ended) };
        device.check("cuEventSynchronize", status)?;
        // SAFETY: the half holds `part.len()` bytes, and the copy into it has ended.
        copy(part, unsafe {
            std::slice::from_raw_parts(half, part.len())
        });
        Ok(())
    }
}

/// Copies between equal lengths, on several threads where that is worth the while.
fn copy(to: &mut [u8], from: &[u8]) {
    if from.len() <= PIECE {
        return to.copy_from_slice(from);
    }
    let pieces = to.par_chunks_mut(PIECE).zip(from.par_chunks(PIECE));
    pieces.for_each(|(to, from)| to.copy_from_slice(from));
}

impl Drop for Staging {
    fn drop(&mut self) {
        let device = &self.pinned.device;
        let _ = device.bind();
        let _ = device.synchronize();
        for event in self.ended.into_iter().filter(|e| !e.is_null()) {
            // SAFETY: the copies have ended, and the event was made in `new`.
            let _ = unsafe { sys::cuEventDestroy_v2(event) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_in_pieces_is_the_copy() {
        for length in [0, 1, PIECE, PIECE + 1, 3 * PIECE + 17] {
            let from: Vec<u8> = (0..length).map(|i| (i * 7 + i / 255) as u8).collect();
            let mut to = vec![0; length];
            copy(&mut to, &from);
            assert_eq!(to, from);
        }
    }
}
