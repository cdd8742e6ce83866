//! Which device a command runs on.

use std::rc::Rc;
use std::str::FromStr;

use clap::Args;

use crate::any_device::AnyDevice;
use crate::cpu::CpuBackend;
use crate::cpu::context::CpuContext;
use crate::cpu::simd::SimdPath;
use crate::cuda::products::GemmChoice;
use crate::cuda::{CudaBackend, device};
use crate::error::DeviceError;

/// The device options that commands share.
#[derive(Args, Clone, Debug)]
pub struct DeviceArguments {
    /// Where to compute: auto, cpu or cuda:N
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    pub device: String,
    /// Threads of the CPU; decides no bit [default: all cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Vector instructions of the CPU: scalar, avx2 or avx512; decides no bit [default: the widest]
    #[arg(long, value_name = "PATH")]
    pub simd: Option<String>,
    /// Matrix products on a GPU: own kernels, or auto for the fastest admitted; decides no bit
    #[arg(long, default_value = "auto", value_name = "CHOICE")]
    pub gemm: String,
}

impl DeviceArguments {
    /// The backend that the options name; `auto` is the first GPU where there is one that can compute,
    /// else the CPU, which is said on standard error with the reason.
    ///
    /// # Errors
    /// A device that is not here or that this build cannot use; a thread pool that cannot start.
    pub fn open(&self) -> Result<AnyDevice, DeviceError> {
        if self.device != "auto" {
            return self.open_named(self.device.parse()?);
        }
        let choice: GemmChoice = self.gemm.parse()?;
        let found = device::probe().and_then(|devices| device::first_usable(&devices));
        match found.and_then(|ordinal| open_cuda(ordinal, choice)) {
            Ok(cuda) => Ok(cuda),
            Err(reason) => {
                super::output::note(format_args!("note: computing on the CPU: {reason}"));
                Ok(AnyDevice::Cpu(self.open_cpu()?))
            }
        }
    }

    /// The backend of a device, with the other options as they are given.
    ///
    /// # Errors
    /// As [`DeviceArguments::open`].
    fn open_named(&self, name: DeviceName) -> Result<AnyDevice, DeviceError> {
        let choice: GemmChoice = self.gemm.parse()?;
        match name {
            DeviceName::Cpu(None) => Ok(AnyDevice::Cpu(self.open_cpu()?)),
            DeviceName::Cpu(Some(path)) => Ok(AnyDevice::Cpu(cpu(path, self.threads)?)),
            DeviceName::Cuda(ordinal) => open_cuda(ordinal, choice),
        }
    }

    /// The CPU, whatever device is named.
    ///
    /// # Errors
    /// A thread pool that cannot start.
    pub fn open_cpu(&self) -> Result<CpuBackend, DeviceError> {
        let path = match &self.simd {
            None => SimdPath::detect(),
            Some(name) => name.parse()?,
        };
        cpu(path, self.threads)
    }
}

/// The CPU on a path, with all cores where no number of threads is given.
fn cpu(path: SimdPath, threads: Option<usize>) -> Result<CpuBackend, DeviceError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(CpuBackend::new(CpuContext::new(
        path,
        threads.unwrap_or(cores),
    )?))
}

/// A CUDA device; says once where the matrix library that may serve is not here.
fn open_cuda(ordinal: usize, choice: GemmChoice) -> Result<AnyDevice, DeviceError> {
    let cuda = CudaBackend::open(ordinal, choice)?;
    if choice == GemmChoice::Auto && cuda.library_version().is_none() {
        super::output::note(
            "note: cuBLASLt was not found: the engine's own matrix products are used",
        );
    }
    Ok(AnyDevice::Cuda(Rc::new(cuda)))
}

/// One device by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeviceName {
    /// `cpu`, or `cpu:PATH` with the vector instructions named.
    Cpu(Option<SimdPath>),
    /// `cuda:N`.
    Cuda(usize),
}

impl FromStr for DeviceName {
    type Err = DeviceError;

    /// Reads a device's name.
    ///
    /// # Errors
    /// [`DeviceError::UnknownDevice`]; a path that does not exist or that this processor lacks.
    fn from_str(text: &str) -> Result<Self, DeviceError> {
        let unknown = || DeviceError::UnknownDevice {
            found: text.to_owned(),
        };
        match text.split_once(':') {
            None if text == "cpu" => Ok(DeviceName::Cpu(None)),
            Some(("cpu", path)) => Ok(DeviceName::Cpu(Some(path.parse()?))),
            Some(("cuda", ordinal)) => {
                let ordinal = ordinal.parse().map_err(|_| unknown())?;
                Ok(DeviceName::Cuda(ordinal))
            }
            _ => Err(unknown()),
        }
    }
}

/// Two devices to compare, such as `cpu,cuda:0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePair([DeviceName; 2]);

impl FromStr for DevicePair {
    type Err = DeviceError;

    /// Reads two names with a comma between them.
    ///
    /// # Errors
    /// [`DeviceError::DevicePair`] unless they are two known names;
    /// [`DeviceError::SimdPathUnavailable`] for a path that this processor lacks.
    fn from_str(text: &str) -> Result<Self, DeviceError> {
        let refused = || DeviceError::DevicePair {
            found: text.to_owned(),
        };
        let (left, right) = text.split_once(',').ok_or_else(refused)?;
        let name = |text: &str| match text.parse() {
            Ok(name) => Ok(name),
            Err(lacking @ DeviceError::SimdPathUnavailable { .. }) => Err(lacking),
            Err(_) => Err(refused()),
        };
        Ok(DevicePair([name(left)?, name(right)?]))
    }
}

impl DevicePair {
    /// Opens both; `--device` of the options is not looked at.
    ///
    /// # Errors
    /// As [`DeviceArguments::open`].
    pub fn open(self, options: &DeviceArguments) -> Result<[AnyDevice; 2], DeviceError> {
        let [left, right] = self.0;
        Ok([options.open_named(left)?, options.open_named(right)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_is_two_names_with_a_comma() {
        let pair = |text: &str| text.parse::<DevicePair>();
        let (cpu, cuda) = (DeviceName::Cpu(None), DeviceName::Cuda(1));
        assert_eq!(pair("cpu,cuda:1"), Ok(DevicePair([cpu, cuda])));
        let scalar = DeviceName::Cpu(Some(SimdPath::Scalar));
        assert_eq!(pair("cpu:scalar,cpu"), Ok(DevicePair([scalar, cpu])));
        for wrong in [
            "",
            "cpu",
            "cpu,",
            "cpu,cpu,cpu",
            "auto,cpu",
            "cpu,cuda",
            "cpu,cpu:mmx",
        ] {
            let refused = DeviceError::DevicePair {
                found: wrong.into(),
            };
            assert_eq!(pair(wrong), Err(refused));
        }
    }

    #[test]
    fn a_name_of_no_device_is_refused() {
        for wrong in ["tpu", "cuda:x", "cuda:-1", "cpu0", ""] {
            let refused = DeviceError::UnknownDevice {
                found: wrong.into(),
            };
            assert_eq!(wrong.parse::<DeviceName>(), Err(refused));
        }
        assert_eq!(
            "fast".parse::<GemmChoice>(),
            Err(DeviceError::UnknownGemm {
                found: "fast".into()
            })
        );
        assert!(matches!(
            "cpu:mmx".parse::<DeviceName>(),
            Err(DeviceError::UnknownSimdPath { .. })
        ));
    }
}
