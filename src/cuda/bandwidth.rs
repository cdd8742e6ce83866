//! The rate at which a device moves bytes, against which kernels that compute little are judged.

use std::sync::Arc;

use super::arena::CudaArena;
use super::device::Device;
use crate::error::DeviceError;
use crate::layout::Region;

/// Bytes of one copy; many times what the device's caches hold.
const COPY_BYTES: usize = 512 << 20;
/// The least that is copied where memory is short, still beyond the caches.
const LEAST_BYTES: usize = 128 << 20;
/// Copies of one timing, and timings, of which the best counts.
const COPIES: u32 = 4;
const TIMINGS: usize = 5;

/// Bytes a second that a copy within the device's memory reads and writes together.
///
/// # Errors
/// Too little free memory; what the driver says.
pub fn copy_bandwidth(device: &Arc<Device>) -> Result<f64, DeviceError> {
    let (free, _) = device.memory()?;
    let bytes = (free / 4).clamp(LEAST_BYTES, COPY_BYTES);
    let arena = CudaArena::zeroed(device, 2 * bytes, Default::default())?;
    let [from, to] = [0, bytes].map(|offset| Region { offset, bytes });
    let copies = || (0..COPIES).try_for_each(|_| arena.copy(from, to));
    // The first copies wake the memory's clock.
    copies()?;
    let mut best = f32::INFINITY;
    for _ in 0..TIMINGS {
        best = best.min(device.time(copies)?);
    }
    let moved = 2.0 * bytes as f64 * f64::from(COPIES);
    Ok(moved / (f64::from(best).max(1e-9) / 1e3))
}
