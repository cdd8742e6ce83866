//! The committed PTX as loaded modules, each compiled by the driver when its first kernel is asked for.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use super::device::Device;
use super::ptx::PTX;
use crate::error::DeviceError;

/// A kernel's handle; valid while its [`Modules`] lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Function(pub(super) sys::CUfunction);

// SAFETY: a handle is a value for the driver, which may be used from any thread.
unsafe impl Send for Function {}

/// The modules of one device.
pub struct Modules {
    device: Arc<Device>,
    loaded: Mutex<Loaded>,
}

#[derive(Default)]
struct Loaded {
    modules: BTreeMap<&'static str, Module>,
    functions: BTreeMap<&'static str, Function>,
}

struct Module(sys::CUmodule);

// SAFETY: as for `Function`.
unsafe impl Send for Module {}

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
            loaded: Mutex::default(),
        }
    }

    /// The kernel of this name, compiled and allowed as much shared memory as the device gives.
    ///
    /// # Errors
    /// No such kernel in this build; PTX that the driver does not take.
    pub(super) fn function(&self, entry: &'static str) -> Result<Function, DeviceError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = loaded.functions.get(entry) {
            return Ok(*function);
        }
        let (stem, ptx) = file_of(entry)?;
        let module = match loaded.modules.get(stem) {
            Some(module) => module.0,
            None => {
                let module = self.load(ptx)?;
                loaded.modules.insert(stem, Module(module));
                module
            }
        };
        let name = CString::new(entry).map_err(|_| no_kernel(entry))?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded, and `name` outlives the call.
        let status = unsafe { sys::cuModuleGetFunction(&mut function, module, name.as_ptr()) };
        if status == sys::CUresult::CUDA_ERROR_NOT_FOUND {
            return Err(no_kernel(entry));
        }
        self.device.check("cuModuleGetFunction", status)?;
        self.allow_shared(function)?;
        loaded.functions.insert(entry, Function(function));
        Ok(Function(function))
    }

    fn load(&self, ptx: &str) -> Result<sys::CUmodule, DeviceError> {
        self.device.bind()?;
        let image = CString::new(ptx).map_err(|_| no_kernel("ptx"))?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the image ends with a zero and outlives the call.
        let status = unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) };
        self.device
            .check("cuModuleLoadData", status)
            .map(|()| module)
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
        for module in loaded.modules.values() {
            // SAFETY: graphs and launches hold an `Arc` of these modules, so no kernel of them is in
            // use once they are dropped. A failure here has nobody to be told.
            let _ = unsafe { sys::cuModuleUnload(module.0) };
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
