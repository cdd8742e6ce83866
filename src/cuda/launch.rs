//! Executes kernel launches: the one place of the crate where a kernel is started.
#![allow(unsafe_code)]

use std::ffi::c_void;

use cudarc::driver::sys;

use super::arena::CudaArena;
use super::call::{Arg, BOX_COLUMNS, KernelLaunch, Matrix};
use super::device::Device;
use super::lanes::Lane;
use super::module::Modules;
use crate::error::DeviceError;

/// An argument as the driver reads it.
pub(super) enum Value {
    /// Eight bytes, of which a shorter argument has the first.
    Word(u64),
    Matrix(Box<sys::CUtensorMap>),
}

impl Value {
    /// Where the driver reads it.
    fn address(&mut self) -> *mut c_void {
        match self {
            Value::Word(word) => std::ptr::from_mut(word).cast(),
            Value::Matrix(map) => std::ptr::from_mut(map.as_mut()).cast(),
        }
    }

    /// Its words.
    pub fn words(&self) -> &[u64] {
        match self {
            Value::Word(word) => std::slice::from_ref(word),
            Value::Matrix(map) => &map.opaque,
        }
    }
}

/// The arguments of a launch as the driver reads them.
pub(super) fn pack(
    device: &Device,
    launch: &KernelLaunch,
    arena: &CudaArena,
) -> Result<Vec<Value>, DeviceError> {
    let pack = |arg: &Arg| match *arg {
        Arg::Region(region) => arena.address(region).map(Value::Word),
        Arg::Workspace { offset } => {
            let region = arena.workspace_region(Lane::Main, offset, 0);
            arena.address(region).map(Value::Word)
        }
        Arg::U32(x) => Ok(Value::Word(u64::from(x))),
        Arg::F32(x) => Ok(Value::Word(u64::from(x.to_bits()))),
        Arg::Matrix(matrix) => {
            let address = arena.address(matrix.region)?;
            encode(device, &matrix, address).map(Value::Matrix)
        }
    };
    launch.args.iter().map(pack).collect()
}

/// A matrix at an address, as the copy engine takes it.
fn encode(
    device: &Device,
    matrix: &Matrix,
    address: sys::CUdeviceptr,
) -> Result<Box<sys::CUtensorMap>, DeviceError> {
    let mut map = Box::new(sys::CUtensorMap { opaque: [0; 16] });
    let sizes = [u64::from(matrix.columns), u64::from(matrix.rows)];
    let stride = [2 * u64::from(matrix.columns)];
    let (of_box, steps) = ([BOX_COLUMNS, matrix.box_rows], [1, 1]);
    // SAFETY: the map is aligned and outlives the call; two sizes, one stride, and two numbers of a box are those of a matrix;
    // the driver checks them, and reads nothing at the address.
    let status = unsafe {
        sys::cuTensorMapEncodeTiled(
            map.as_mut(),
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
            2,
            address as *mut c_void,
            sizes.as_ptr(),
            stride.as_ptr(),
            of_box.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    device.check("cuTensorMapEncodeTiled", status)?;
    Ok(map)
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
    let mut values = pack(device, launch, arena)?;
    let mut params: Vec<*mut c_void> = values.iter_mut().map(Value::address).collect();
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
