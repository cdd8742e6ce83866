//! One CUDA device: probing, its context and its one stream.
//!
//! Nothing here is touched before the driver library is known to be there: a machine without CUDA gets
//! a typed error and no panic.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::call::DeviceShape;
use super::exclusive;
use crate::error::DeviceError;
use crate::shape::Math;

/// The oldest CUDA version whose driver compiles the committed PTX.
pub const OLDEST_CUDA: (i32, i32) = (12, 4);

/// The oldest compute capability that the committed PTX runs on.
pub const OLDEST_CAPABILITY: (i32, i32) = (8, 0);

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

/// The devices of this machine, in the driver's order; none where the driver finds none.
///
/// # Errors
/// [`DeviceError::NoDriver`], [`DeviceError::DriverTooOld`], or what the driver says.
pub fn probe() -> Result<Vec<GpuInfo>, DeviceError> {
    // SAFETY: only looks whether the library can be loaded.
    if !unsafe { sys::is_culib_present() } {
        return Err(DeviceError::NoDriver);
    }
    let mut version = 0;
    // SAFETY: the library is there, and `version` outlives the call, which needs no cuInit.
    check("cuda", "cuDriverGetVersion", unsafe {
        sys::cuDriverGetVersion(&mut version)
    })?;
    let driver_cuda = new_enough(version)?;
    // SAFETY: the library is there, and cuInit takes no pointer.
    let status = unsafe { sys::cuInit(0) };
    if !finds_devices(status)? {
        return Ok(Vec::new());
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

/// The CUDA version of a driver from the number it tells, 1000 · major + 10 · minor.
fn new_enough(version: i32) -> Result<(i32, i32), DeviceError> {
    let found = (version / 1000, version % 1000 / 10);
    match found >= OLDEST_CUDA {
        true => Ok(found),
        false => Err(DeviceError::DriverTooOld {
            found_major: found.0,
            found_minor: found.1,
        }),
    }
}

/// Whether a driver that has answered its initialisation has any device; having none is no fault.
fn finds_devices(status: sys::CUresult) -> Result<bool, DeviceError> {
    match status {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => Ok(false),
        status => check("cuda", "cuInit", status).map(|()| true),
    }
}

/// The device of this number, where it can compute.
///
/// # Errors
/// [`DeviceError::NoDevice`]; [`DeviceError::Architecture`].
pub fn select(devices: &[GpuInfo], ordinal: usize) -> Result<&GpuInfo, DeviceError> {
    let found = devices.len();
    let info = devices.get(ordinal).ok_or(DeviceError::NoDevice {
        wanted: ordinal,
        found,
    })?;
    info.check_capability().map(|()| info)
}

/// The number of the first device that can compute.
///
/// # Errors
/// [`DeviceError::NoDevice`] where there is none at all; else why the first one cannot.
pub fn first_usable(devices: &[GpuInfo]) -> Result<usize, DeviceError> {
    let mut usable = devices.iter().filter(|d| d.check_capability().is_ok());
    match usable.next() {
        Some(info) => Ok(info.ordinal),
        None => select(devices, 0).map(|info| info.ordinal),
    }
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
    /// `cuda:N`.
    pub fn label(&self) -> String {
        format!("cuda:{}", self.ordinal)
    }

    /// Checks that the kernels run on the device.
    ///
    /// # Errors
    /// [`DeviceError::Architecture`].
    pub fn check_capability(&self) -> Result<(), DeviceError> {
        if self.capability >= OLDEST_CAPABILITY {
            return Ok(());
        }
        let (found_major, found_minor) = self.capability;
        Err(DeviceError::Architecture {
            device: format!("cuda:{} ({})", self.ordinal, self.name),
            found_major,
            found_minor,
        })
    }

    /// The operations a second of products at the highest clock, a multiply-add counted as two: of 128 f32
    /// lanes a multiprocessor, or of its tensor cores on dense operands (NVIDIA's whitepapers of the
    /// architectures).
    pub fn peak(&self, math: Math) -> f64 {
        let tensor_cores = match self.capability {
            (9, _) => 4096.0,
            (8, 0) => 2048.0,
            _ => 1024.0,
        };
        let per_clock = match math {
            Math::F32 => 256.0,
            Math::Tf32 => tensor_cores / 2.0,
            Math::Bf16 | Math::F16 => tensor_cores,
        };
        f64::from(self.multiprocessors) * per_clock * self.clock_hz
    }
}

/// `cuEventElapsedTime`.
// SAFETY: only the type of the driver's own function; each call of it has a proof of its own.
type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

/// The driver's function under its first name: the second one is younger than [`OLDEST_CUDA`], and the
/// bindings panic where a driver lacks a function.
fn elapsed_time(device: &str) -> Result<ElapsedTime, DeviceError> {
    // SAFETY: the driver is loaded, since a device is open; under this name it has had this signature
    // in every version.
    let found = unsafe { sys::culib().get::<ElapsedTime>(b"cuEventElapsedTime\0") };
    let function = found.map_err(|error| DeviceError::Driver {
        device: device.to_owned(),
        call: "cuEventElapsedTime",
        text: error.to_string(),
    })?;
    Ok(*function)
}

impl Device {
    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// As [`probe`]; no such device; a device that is too old for the kernels.
    pub fn open(ordinal: usize) -> Result<Arc<Device>, DeviceError> {
        let info = select(&probe()?, ordinal)?.clone();
        let label = format!("cuda:{ordinal}");
        let _aside = exclusive::aside();
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
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `stream` outlives the call; `Drop` destroys it.
        check(&label, "cuStreamCreate", unsafe {
            sys::cuStreamCreate(&mut stream, flags)
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
            warpgroups: self.info.capability == super::probe::HOPPER,
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
        let elapsed = elapsed_time(&self.label())?;
        // SAFETY: both events are recorded and done, and `ms` outlives the call.
        let status = unsafe { elapsed(&mut ms, events.0[0], events.0[1]) };
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
        let _aside = exclusive::aside();
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

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(ordinal: usize, capability: (i32, i32)) -> GpuInfo {
        GpuInfo {
            ordinal,
            name: "Some GPU".into(),
            capability,
            total_bytes: 1 << 34,
            multiprocessors: 10,
            shared_bytes_per_block: 1 << 16,
            clock_hz: 1e9,
            driver_cuda: (12, 4),
        }
    }

    #[test]
    fn a_driver_that_is_too_old_is_refused_by_its_version() {
        assert_eq!(new_enough(12_040), Ok((12, 4)));
        assert_eq!(new_enough(13_000), Ok((13, 0)));
        assert_eq!(
            new_enough(12_030),
            Err(DeviceError::DriverTooOld {
                found_major: 12,
                found_minor: 3
            })
        );
    }

    #[test]
    fn a_driver_without_devices_is_no_fault() {
        assert_eq!(finds_devices(sys::CUresult::CUDA_SUCCESS), Ok(true));
        assert_eq!(
            finds_devices(sys::CUresult::CUDA_ERROR_NO_DEVICE),
            Ok(false)
        );
    }

    #[test]
    fn a_device_is_selected_where_it_exists_and_can_compute() {
        let devices = [gpu(0, (7, 5)), gpu(1, (8, 0)), gpu(2, (9, 0))];
        assert_eq!(select(&devices, 1), Ok(&devices[1]));
        let (wanted, found) = (3, 3);
        assert_eq!(
            select(&devices, 3),
            Err(DeviceError::NoDevice { wanted, found })
        );
        assert_eq!(
            select(&devices, 0),
            Err(DeviceError::Architecture {
                device: "cuda:0 (Some GPU)".into(),
                found_major: 7,
                found_minor: 5
            })
        );
    }

    #[test]
    fn the_first_device_that_can_compute_is_found_behind_older_ones() {
        assert_eq!(first_usable(&[gpu(0, (7, 0)), gpu(1, (9, 0))]), Ok(1));
        let (wanted, found) = (0, 0);
        assert_eq!(
            first_usable(&[]),
            Err(DeviceError::NoDevice { wanted, found })
        );
        assert!(matches!(
            first_usable(&[gpu(0, (6, 1))]),
            Err(DeviceError::Architecture { .. })
        ));
    }

    #[test]
    fn without_a_driver_the_probe_says_so_and_with_one_it_answers() {
        // SAFETY: only looks whether the library can be loaded.
        match unsafe { sys::is_culib_present() } {
            true => {
                let refused = finds_devices(sys::CUresult::CUDA_ERROR_UNKNOWN);
                let call = "cuInit";
                assert!(matches!(refused, Err(DeviceError::Driver { call: c, .. }) if c == call));
                probe().expect("a driver answers");
            }
            false => assert_eq!(probe(), Err(DeviceError::NoDriver)),
        }
    }
}
