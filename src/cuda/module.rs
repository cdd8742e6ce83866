//! The committed PTX as loaded modules, one a kernel, each compiled by the driver when it is first needed.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;
use rayon::prelude::*;

use super::device::Device;
use super::exclusive;
use super::ptx::{PTX, alone};
use crate::error::DeviceError;

/// A kernel's handle; valid while its [`Modules`] lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Function(pub(super) sys::CUfunction);

// SAFETY: a handle is a value for the driver, which may be used from any thread.
unsafe impl Send for Function {}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// The modules of one device.
pub struct Modules {
    device: Arc<Device>,
    id: u64,
    loaded: Mutex<BTreeMap<&'static str, Kernel>>,
}

/// A kernel and the module that holds it alone.
struct Kernel {
    module: sys::CUmodule,
    function: Function,
}

// SAFETY: as for `Function`.
unsafe impl Send for Kernel {}

impl Kernel {
    /// Gives the module back, of which nothing runs. A failure here has nobody to be told.
    fn unload(self) {
        let _aside = exclusive::aside();
        // SAFETY: the module is loaded and the value that names it ends here; callers see to it that no
        // kernel of it is in use, and that the device's context is current.
        let _ = unsafe { sys::cuModuleUnload(self.module) };
    }
}

/// The file of `ptx/` that holds an entry: the longest stem that the entry starts with.
pub fn stem_of(entry: &str) -> Option<(&'static str, &'static str)> {
    let fits = PTX.iter().filter(|(stem, _)| entry.starts_with(stem));
    fits.max_by_key(|(stem, _)| stem.len()).copied()
}

/// As [`stem_of`], with the error of an entry that no file holds.
fn file_of(entry: &str) -> Result<(&'static str, &'static str), DeviceError> {
    stem_of(entry).ok_or_else(|| no_kernel(entry))
}

fn no_kernel(entry: &str) -> DeviceError {
    DeviceError::NoKernel {
        entry: entry.to_owned(),
    }
}

impl Modules {
    /// No module loaded yet.
    pub fn new(device: Arc<Device>) -> Self {
        Modules {
            device,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            loaded: Mutex::default(),
        }
    }

    /// Which modules these are. A module once loaded stays until all of them are dropped, so the same
    /// identity means the same handles, compiled from the same PTX.
    pub fn id(&self) -> u64 {
        self.id
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<&'static str, Kernel>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The kernel of this name, compiled and allowed as much shared memory as the device gives.
    ///
    /// # Errors
    /// No such kernel in this build; PTX that the driver does not take.
    pub(super) fn function(&self, entry: &'static str) -> Result<Function, DeviceError> {
        let mut loaded = self.table();
        if let Some(kernel) = loaded.get(entry) {
            return Ok(kernel.function);
        }
        let kernel = self.load(entry)?;
        let function = kernel.function;
        loaded.insert(entry, kernel);
        Ok(function)
    }

    /// Compiles the kernels that are not loaded yet side by side: compiling is what a start waits for.
    ///
    /// # Errors
    /// As for a single kernel; those that were compiled stay.
    pub(super) fn prepare(&self, mut entries: Vec<&'static str>) -> Result<(), DeviceError> {
        entries.sort_unstable();
        entries.dedup();
        entries.retain(|entry| !self.table().contains_key(entry));
        let made: Vec<_> = entries.par_iter().map(|entry| self.load(entry)).collect();
        let mut outcome = Ok(());
        let mut loaded = self.table();
        for (entry, made) in entries.into_iter().zip(made) {
            match made {
                Err(fault) => outcome = outcome.and(Err(fault)),
                // A thread that asked for the kernel meanwhile has it already, and may have used it.
                Ok(kernel) if loaded.contains_key(entry) => kernel.unload(),
                Ok(kernel) => drop(loaded.insert(entry, kernel)),
            }
        }
        outcome
    }

    fn load(&self, entry: &str) -> Result<Kernel, DeviceError> {
        let (_, text) = file_of(entry)?;
        let text = alone(text, entry).ok_or_else(|| no_kernel(entry))?;
        let image = CString::new(text).map_err(|_| no_kernel(entry))?;
        let name = CString::new(entry).map_err(|_| no_kernel(entry))?;
        // The thread may be one that has not used the device before.
        self.device.bind()?;
        let mut module = std::ptr::null_mut();
        let _aside = exclusive::aside();
        // SAFETY: the image ends with a zero and outlives the call.
        let status = unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) };
        self.device.check("cuModuleLoadData", status)?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded, and `name` outlives the call.
        let status = unsafe { sys::cuModuleGetFunction(&mut function, module, name.as_ptr()) };
        let found = match status {
            sys::CUresult::CUDA_ERROR_NOT_FOUND => Err(no_kernel(entry)),
            status => self.device.check("cuModuleGetFunction", status),
        };
        let kernel = Kernel {
            module,
            function: Function(function),
        };
        match found.and_then(|()| self.allow_shared(function)) {
            Ok(()) => Ok(kernel),
            Err(fault) => {
                kernel.unload();
                Err(fault)
            }
        }
    }

    fn allow_shared(&self, function: sys::CUfunction) -> Result<(), DeviceError> {
        use sys::CUfunction_attribute as Attribute;
        let mut fixed = 0;
        // SAFETY: the function was just looked up, and `fixed` outlives the call.
        let status = unsafe {
            sys::cuFuncGetAttribute(
                &mut fixed,
                Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                function,
            )
        };
        self.device.check("cuFuncGetAttribute", status)?;
        let most = self.device.info.shared_bytes_per_block as i32 - fixed;
        // SAFETY: the function was just looked up.
        let status = unsafe {
            sys::cuFuncSetAttribute(
                function,
                Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                most,
            )
        };
        self.device.check("cuFuncSetAttribute", status)
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        let loaded = self
            .loaded
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        let _ = self.device.bind();
        // Graphs and launches hold an `Arc` of these modules, so no kernel of them is in use now.
        for kernel in std::mem::take(loaded).into_values() {
            kernel.unload();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_that_no_file_holds_is_refused() {
        let (stem, ptx) = PTX[0];
        assert_eq!(file_of(stem), Ok((stem, ptx)));
        assert_eq!(
            file_of("no_such_kernel"),
            Err(DeviceError::NoKernel {
                entry: "no_such_kernel".into()
            })
        );
    }
}
