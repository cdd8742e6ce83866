//! One CUDA device: probing, its context and its one stream.
//!
//! Nothing here is touched before the driver library is known to be there: a machine without CUDA gets
//! a typed error and no panic.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::call::DeviceShape;
use crate::error::DeviceError;

/// The oldest CUDA version whose driver compiles the committed PTX.
pub const OLDEST_CUDA: (i32, i32) = (12, 4);

/// What is known about a device before it is opened.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuInfo {
    pub ordinal: usize,
    pub name: String,
    pub capability: (i32, i32),
    pub total_bytes: usize,
    pub multiprocessors: u32,
    pub shared_bytes_per_block: u32,
    /// The highest clock of the multiprocessors.
    pub clock_hz: f64,
    /// The CUDA version that the driver supports.
    pub driver_cuda: (i32, i32),
}

/// An open device. Every call into the driver from this crate happens with its context current.
pub struct Device {
    pub info: GpuInfo,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
}

// SAFETY: the driver's handles may be used from any thread; `bind` makes the context current before
// each use, and the engine owns the device through `&mut` or an `Arc` that it does not hand out.
unsafe impl Send for Device {}
// SAFETY: as above; the driver's own functions are thread-safe.
unsafe impl Sync for Device {}

/// Turns a driver's answer into this crate's error.
pub(super) fn check(
    device: &str,
    call: &'static str,
    status: sys::CUresult,
) -> Result<(), DeviceError> {
    status.result().map_err(|error| {
        let text = error.error_string().ok().and_then(|t| t.to_str().ok());
        DeviceError::Driver {
            device: device.to_owned(),
            call,
            text: text.unwrap_or("unknown error").to_owned(),
        }
    })
}

/// The devices of this machine.
///
/// # Errors
/// [`DeviceError::NoDriver`], [`DeviceError::DriverTooOld`], or what the driver says.
pub fn probe() -> Result<Vec<GpuInfo>, DeviceError> {
    // SAFETY: only looks whether the library can be loaded.
    if !unsafe { sys::is_culib_present() } {
        return Err(DeviceError::NoDriver);
    }
    // SAFETY: the library is there, and cuInit takes no pointer.
    check("cuda", "cuInit", unsafe { sys::cuInit(0) })?;
    let mut version = 0;
    // SAFETY: `version` outlives the call.
    check("cuda", "cuDriverGetVersion", unsafe {
        sys::cuDriverGetVersion(&mut version)
    })?;
    let driver_cuda = (version / 1000, version % 1000 / 10);
    if driver_cuda < OLDEST_CUDA {
        let (found_major, found_minor) = driver_cuda;
        return Err(DeviceError::DriverTooOld {
            found_major,
            found_minor,
        });
    }
    let mut count = 0;
    // SAFETY: `count` outlives the call.
    check("cuda", "cuDeviceGetCount", unsafe {
        sys::cuDeviceGetCount(&mut count)
    })?;
    (0..count)
        .map(|ordinal| describe(ordinal, driver_cuda))
        .collect()
}

fn describe(ordinal: i32, driver_cuda: (i32, i32)) -> Result<GpuInfo, DeviceError> {
    use sys::CUdevice_attribute as Attribute;
    let label = format!("cuda:{ordinal}");
    let mut device = 0;
    // SAFETY: `device` outlives the call.
    check(&label, "cuDeviceGet", unsafe {
        sys::cuDeviceGet(&mut device, ordinal)
    })?;
    let mut name = [0 as std::ffi::c_char; 128];
    // SAFETY: the driver writes at most the length it is given, with a final zero.
    let status = unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 128, device) };
    check(&label, "cuDeviceGetName", status)?;
    // SAFETY: the driver has ended the name with a zero inside the array.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }
        .to_string_lossy()
        .into_owned();
    let mut total_bytes = 0;
    // SAFETY: `total_bytes` outlives the call.
    let status = unsafe { sys::cuDeviceTotalMem_v2(&mut total_bytes, device) };
    check(&label, "cuDeviceTotalMem", status)?;
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: `value` outlives the call.
        let status = unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) };
        check(&label, "cuDeviceGetAttribute", status).map(|()| value)
    };
    Ok(GpuInfo {
        ordinal: ordinal as usize,
        name,
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        total_bytes,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        shared_bytes_per_block: attribute(
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        )? as u32,
        clock_hz: f64::from(attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?) * 1e3,
        driver_cuda,
    })
}

impl GpuInfo {
    /// The f32 operations a second of 128 lanes a multiprocessor at the highest clock.
    pub fn fma_peak(&self) -> f64 {
        f64::from(self.multiprocessors) * 128.0 * 2.0 * self.clock_hz
    }
}

impl Device {
    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// As [`probe`]; no such device; a device that is too old for the kernels.
    pub fn open(ordinal: usize) -> Result<Arc<Device>, DeviceError> {
        let devices = probe()?;
        let found = devices.len();
        let info = devices
            .into_iter()
            .nth(ordinal)
            .ok_or(DeviceError::NoDevice {
                wanted: ordinal,
                found,
            })?;
        if info.capability < (8, 0) {
            let (found_major, found_minor) = info.capability;
            let device = format!("cuda:{ordinal} ({})", info.name);
            return Err(DeviceError::Architecture {
                device,
                found_major,
                found_minor,
            });
        }
        let label = format!("cuda:{ordinal}");
        let mut device = 0;
        // SAFETY: `device` outlives the call, and the ordinal was counted above.
        check(&label, "cuDeviceGet", unsafe {
            sys::cuDeviceGet(&mut device, ordinal as i32)
        })?;
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` outlives the call; `Drop` releases what is retained here.
        let status = unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) };
        check(&label, "cuDevicePrimaryCtxRetain", status)?;
        // SAFETY: the context was retained above.
        check(&label, "cuCtxSetCurrent", unsafe {
            sys::cuCtxSetCurrent(context)
        })?;
        let stream =
            result::stream::create(result::stream::StreamKind::NonBlocking).map_err(|e| {
                DeviceError::Driver {
                    device: label,
                    call: "cuStreamCreate",
                    text: format!("{e:?}"),
                }
            })?;
        Ok(Arc::new(Device {
            info,
            device,
            context,
            stream,
        }))
    }

    /// `cuda:N`.
    pub fn label(&self) -> String {
        format!("cuda:{}", self.info.ordinal)
    }

    /// What of the device decides launches.
    pub fn shape(&self) -> DeviceShape {
        DeviceShape {
            multiprocessors: self.info.multiprocessors,
            shared_bytes_per_block: self.info.shared_bytes_per_block,
        }
    }

    /// The one stream that everything is issued to, in order.
    pub(super) fn stream(&self) -> sys::CUstream {
        self.stream
    }

    /// The stream as a number; no other stream has it while this device is open.
    pub(super) fn stream_id(&self) -> u64 {
        self.stream as u64
    }

    /// Makes the context current on this thread.
    ///
    /// # Errors
    /// What the driver says.
    pub(super) fn bind(&self) -> Result<(), DeviceError> {
        // SAFETY: the context lives as long as `self`.
        self.check("cuCtxSetCurrent", unsafe {
            sys::cuCtxSetCurrent(self.context)
        })
    }

    /// Turns a driver's answer into an error that names this device.
    pub(super) fn check(
        &self,
        call: &'static str,
        status: sys::CUresult,
    ) -> Result<(), DeviceError> {
        // The label is only made for a fault: a step asks this for each of its calls.
        match status {
            sys::CUresult::CUDA_SUCCESS => Ok(()),
            fault => check(&self.label(), call, fault),
        }
    }

    /// Waits for everything issued so far.
    ///
    /// # Errors
    /// The first fault of anything issued.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the stream lives as long as `self`.
        self.check("cuStreamSynchronize", unsafe {
            sys::cuStreamSynchronize(self.stream)
        })
    }

    /// Milliseconds that what `run` issues takes on the device.
    ///
    /// # Errors
    /// What `run` fails with, or what the driver says.
    pub fn time(&self, run: impl Fn() -> Result<(), DeviceError>) -> Result<f32, DeviceError> {
        self.bind()?;
        let events = Events::new(self)?;
        // SAFETY: the events and the stream live until after the calls.
        self.check("cuEventRecord", unsafe {
            sys::cuEventRecord(events.0[0], self.stream)
        })?;
        run()?;
        // SAFETY: as above.
        self.check("cuEventRecord", unsafe {
            sys::cuEventRecord(events.0[1], self.stream)
        })?;
        // SAFETY: as above.
        let status = unsafe { sys::cuEventSynchronize(events.0[1]) };
        self.check("cuEventSynchronize", status)?;
        let mut ms = 0.0;
        // SAFETY: both events are recorded and done, and `ms` outlives the call.
        let status = unsafe { sys::cuEventElapsedTime_v2(&mut ms, events.0[0], events.0[1]) };
        self.check("cuEventElapsedTime", status).map(|()| ms)
    }

    /// Free and total bytes of the device's memory.
    ///
    /// # Errors
    /// What the driver says.
    pub fn memory(&self) -> Result<(usize, usize), DeviceError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both values outlive the call.
        let status = unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) };
        self.check("cuMemGetInfo", status).map(|()| (free, total))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: `open` made the stream and retained the context; everything that uses them holds an
        // `Arc` of this device, so nothing is in use now. A failure here has nobody to be told.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
            let _ = sys::cuStreamSynchronize(self.stream);
            let _ = sys::cuStreamDestroy_v2(self.stream);
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

/// Two events with times; destroyed when dropped.
struct Events([sys::CUevent; 2]);

impl Events {
    fn new(device: &Device) -> Result<Self, DeviceError> {
        let mut events = Events([std::ptr::null_mut(); 2]);
        for event in &mut events.0 {
            // SAFETY: `event` outlives the call; `Drop` destroys it.
            device.check("cuEventCreate", unsafe { sys::cuEventCreate(event, 0) })?;
        }
        Ok(events)
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        for event in self.0.into_iter().filter(|e| !e.is_null()) {
            // SAFETY: the event was created above and its time has been read.
            let _ = unsafe { sys::cuEventDestroy_v2(event) };
        }
    }
}
