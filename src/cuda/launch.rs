//! Executes kernel launches: the one place of the crate where a kernel is started.
#![allow(unsafe_code)]

use std::ffi::c_void;

use cudarc::driver::sys;

use super::arena::CudaArena;
use super::call::{Arg, KernelLaunch};
use super::device::Device;
use super::lanes::Lane;
use super::module::Modules;
use crate::error::DeviceError;

/// The arguments of a launch as the driver reads them: eight bytes each, whatever their type.
pub(super) fn pack(launch: &KernelLaunch, arena: &CudaArena) -> Result<Vec<u64>, DeviceError> {
    let pack = |arg: &Arg| match *arg {
        Arg::Region(region) => arena.address(region),
        Arg::Workspace { offset } => arena.address(arena.workspace_region(Lane::Main, offset, 0)),
        Arg::U32(x) => Ok(u64::from(x)),
        Arg::F32(x) => Ok(u64::from(x.to_bits())),
    };
    launch.args.iter().map(pack).collect()
}

/// Issues one kernel to the device's stream.
///
/// # Errors
/// A kernel this build does not have, a region outside the arena, what the driver says.
pub(super) fn launch(
    device: &Device,
    modules: &Modules,
    arena: &CudaArena,
    launch: &KernelLaunch,
) -> Result<(), DeviceError> {
    let function = modules.function(launch.entry)?;
    let mut values = pack(launch, arena)?;
    let mut params: Vec<*mut c_void> = values
        .iter_mut()
        .map(|v| std::ptr::from_mut(v).cast())
        .collect();
    let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
    // SAFETY: the function is loaded in this device's context; the committed signatures are held equal
    // to the arguments' types by a test; every pointer is an address inside the arena, which the
    // caller holds; the driver copies the parameters before it returns.
    let status = unsafe {
        sys::cuLaunchKernel(
            function.0,
            gx,
            gy,
            gz,
            bx,
            by,
            bz,
            launch.shared_bytes,
            device.stream(),
            params.as_mut_ptr(),
            std::ptr::null_mut(),
        )
    };
    device.check("cuLaunchKernel", status)
}
