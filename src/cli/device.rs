//! Which device a command runs on.

use clap::Args;

use crate::cpu::CpuBackend;
use crate::cpu::context::CpuContext;
use crate::cpu::simd::SimdPath;
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
}

impl DeviceArguments {
    /// The backend that the options name.
    ///
    /// # Errors
    /// A device that is not here or that this build cannot use; a thread pool that cannot start.
    pub fn open(&self) -> Result<CpuBackend, DeviceError> {
        match self.device.as_str() {
            "auto" | "cpu" => {}
            other => {
                return Err(DeviceError::Unavailable {
                    device: other.to_owned(),
                    reason: "this version computes on the CPU; use --device cpu".into(),
                });
            }
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let path = match &self.simd {
            None => SimdPath::detect(),
            Some(name) => name.parse()?,
        };
        let context = CpuContext::new(path, self.threads.unwrap_or(cores))?;
        Ok(CpuBackend::new(context))
    }
}
