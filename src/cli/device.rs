//! Which device a command runs on.

use std::rc::Rc;

use clap::Args;

use crate::any_device::AnyDevice;
use crate::cpu::CpuBackend;
use crate::cpu::context::CpuContext;
use crate::cpu::simd::SimdPath;
use crate::cuda::CudaBackend;
use crate::cuda::products::GemmChoice;
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
    /// else the CPU.
    ///
    /// # Errors
    /// A device that is not here or that this build cannot use; a thread pool that cannot start.
    pub fn open(&self) -> Result<AnyDevice, DeviceError> {
        let choice: GemmChoice = self.gemm.parse()?;
        match self.device.as_str() {
            "cpu" => Ok(AnyDevice::Cpu(self.open_cpu()?)),
            "auto" => match CudaBackend::open(0, choice) {
                Ok(cuda) => Ok(AnyDevice::Cuda(Rc::new(cuda))),
                Err(DeviceError::NoDriver | DeviceError::NoDevice { .. }) => {
                    Ok(AnyDevice::Cpu(self.open_cpu()?))
                }
                Err(reason) => {
                    super::output::note(format_args!("note: computing on the CPU: {reason}"));
                    Ok(AnyDevice::Cpu(self.open_cpu()?))
                }
            },
            other => {
                let ordinal = other.strip_prefix("cuda:").and_then(|n| n.parse().ok());
                let ordinal = ordinal.ok_or_else(|| DeviceError::UnknownDevice {
                    found: other.to_owned(),
                })?;
                Ok(AnyDevice::Cuda(Rc::new(CudaBackend::open(
                    ordinal, choice,
                )?)))
            }
        }
    }

    /// The CPU, whatever device is named.
    ///
    /// # Errors
    /// A thread pool that cannot start.
    pub fn open_cpu(&self) -> Result<CpuBackend, DeviceError> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let path = match &self.simd {
            None => SimdPath::detect(),
            Some(name) => name.parse()?,
        };
        let context = CpuContext::new(path, self.threads.unwrap_or(cores))?;
        Ok(CpuBackend::new(context))
    }
}
