//! `bitstep doctor`.

use clap::Args;

use super::Outcome;
use super::machine;
use crate::cpu::simd::SimdPath;
use crate::cuda::device::{self, Device, GpuInfo};
use crate::cuda::gemm::Lt;
use crate::cuda::probe::{HOPPER, probe};
use crate::error::{DeviceError, ExitCode};
use crate::num;
use crate::num::tensor_step::Kind;
use crate::shape::Math;

/// Arguments of `bitstep doctor`.
#[derive(Args, Debug)]
pub struct Doctor {
    /// Also run the tensor cores of every GPU on cases that tell their arithmetic, beside the contract's
    #[arg(long)]
    probe: bool,
}

impl Doctor {
    /// Prints what is here; finding nothing is no error.
    pub fn run(self) -> Outcome {
        print_processor();
        let usable = print_cuda();
        let labels: Vec<String> = usable.iter().map(|gpu| gpu.label()).collect();
        say!("Numeric domains (contract version {})", num::VERSION);
        say!("  {:<11} {}", Math::F32.domain(), proven_text(&labels));
        say!("  {:<11} {}", "*.sm90", tensor_text(&usable));
        let mut outcome = ExitCode::Done;
        for gpu in usable.iter().filter(|_| self.probe) {
            let report = probe(gpu.ordinal)?;
            say!("{report}");
            let proven = Kind::ALL.iter().all(|&kind| report.proven(kind));
            if gpu.capability == HOPPER && !proven {
                outcome = ExitCode::Differs;
            }
        }
        Ok(outcome)
    }
}

fn print_processor() {
    say!("CPU");
    say!("  model       {}", machine::processor());
    say!("  threads     {}", machine::cores());
    if let Some((total, available)) = machine::memory_bytes() {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        say!(
            "  memory      {:.1} GiB, {:.1} GiB available",
            gib(total),
            gib(available)
        );
    }
    say!("  features    {}", features().join(" "));
    let paths: Vec<&str> = SimdPath::available().iter().map(|p| p.name()).collect();
    say!(
        "  paths       {} (used by default: {})",
        paths.join(" "),
        SimdPath::detect()
    );
}

/// The processor's features that a path needs.
#[cfg(target_arch = "x86_64")]
fn features() -> Vec<&'static str> {
    let detected = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512dq", is_x86_feature_detected!("avx512dq")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
    ];
    let here = detected.into_iter().filter(|(_, here)| *here);
    let names: Vec<&str> = here.map(|(name, _)| name).collect();
    match names.is_empty() {
        true => vec!["none of those that a vector path needs"],
        false => names,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn features() -> Vec<&'static str> {
    vec!["none of those that a vector path needs"]
}

/// Prints what there is of CUDA; gives the devices that can compute.
fn print_cuda() -> Vec<GpuInfo> {
    say!("CUDA");
    let driver = machine::nvidia_driver();
    say!(
        "  driver      {}",
        driver.as_deref().unwrap_or("none loaded")
    );
    let devices = match device::probe() {
        Ok(devices) => devices,
        Err(reason) => {
            say!("  GPUs        none: {reason}");
            return Vec::new();
        }
    };
    let Some(first) = devices.first() else {
        say!("  GPUs        none: the driver finds no device");
        return Vec::new();
    };
    let (major, minor) = first.driver_cuda;
    say!("  version     CUDA {major}.{minor}");
    let mut usable = Vec::new();
    for info in &devices {
        let label = format!("cuda:{}", info.ordinal);
        let opened = look_at(info);
        say!("  {label:<11} {}", device_text(info, opened.as_ref().ok()));
        match opened {
            Ok(opened) => {
                say!("  cuBLASLt    {}", library_text(opened.library));
                usable.push(info.clone());
            }
            Err(reason) => say!("              cannot compute: {reason}"),
        }
    }
    usable
}

/// What only an open device tells.
struct Opened {
    free_bytes: usize,
    /// The version of cuBLASLt, or what became of looking for it.
    library: Result<Option<usize>, DeviceError>,
}

fn look_at(info: &GpuInfo) -> Result<Opened, DeviceError> {
    let device = Device::open(info.ordinal)?;
    let (free_bytes, _) = device.memory()?;
    let library = Lt::open(&device).map(|lt| lt.map(|lt| lt.version));
    Ok(Opened {
        free_bytes,
        library,
    })
}

fn device_text(info: &GpuInfo, opened: Option<&Opened>) -> String {
    let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
    let free = opened.map(|o| format!("{:.1} GiB free of ", gib(o.free_bytes)));
    let (major, minor) = info.capability;
    format!(
        "{}, compute capability {major}.{minor}, {}{:.1} GiB",
        info.name,
        free.unwrap_or_default(),
        gib(info.total_bytes)
    )
}

fn library_text(library: Result<Option<usize>, DeviceError>) -> String {
    match library {
        Ok(Some(version)) => format!("{version}"),
        Ok(None) => "not found: the engine's own matrix products are used".into(),
        Err(reason) => format!("cannot be used: {reason}"),
    }
}

/// Where the f32 domain is proven, here and in general.
fn proven_text(usable: &[String]) -> String {
    let here = std::iter::once("cpu").chain(usable.iter().map(String::as_str));
    let (major, minor) = device::OLDEST_CAPABILITY;
    format!(
        "proven on the CPU and on every CUDA GPU of compute capability {major}.{minor} or newer; here: {}",
        here.collect::<Vec<_>>().join(", ")
    )
}

/// Where the domains of Hopper's tensor cores are proven, and which GPUs here compute them unproven.
fn tensor_text(usable: &[GpuInfo]) -> String {
    let here = |hopper: bool| {
        let wanted = usable
            .iter()
            .filter(|gpu| (gpu.capability == HOPPER) == hopper);
        wanted.map(GpuInfo::label).collect::<Vec<_>>()
    };
    let mut proven = vec!["cpu".to_owned()];
    proven.extend(here(true));
    let mut text = format!(
        "bf16, f16, tf32: proven on the CPU, which emulates the tensor cores of compute capability 9.0, and there; here: {}",
        proven.join(", ")
    );
    let unproven = here(false);
    if !unproven.is_empty() {
        text += &format!("; unproven on {}", unproven.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> GpuInfo {
        GpuInfo {
            ordinal: 1,
            name: "Some GPU".into(),
            capability: (7, 5),
            total_bytes: 3 << 29,
            multiprocessors: 10,
            shared_bytes_per_block: 1 << 16,
            clock_hz: 1e9,
            driver_cuda: (12, 4),
        }
    }

    #[test]
    fn a_device_is_told_with_its_memory_as_far_as_it_is_known() {
        let closed = device_text(&info(), None);
        assert_eq!(closed, "Some GPU, compute capability 7.5, 1.5 GiB");
        let opened = Opened {
            free_bytes: 1 << 30,
            library: Ok(None),
        };
        let open = device_text(&info(), Some(&opened));
        assert_eq!(
            open,
            "Some GPU, compute capability 7.5, 1.0 GiB free of 1.5 GiB"
        );
    }

    #[test]
    fn the_matrix_library_is_a_version_an_absence_or_a_fault() {
        assert_eq!(library_text(Ok(Some(120_401))), "120401");
        assert!(library_text(Ok(None)).starts_with("not found"));
        let fault = DeviceError::Driver {
            device: "cuda:0".into(),
            call: "cublasLtCreate",
            text: "no".into(),
        };
        assert_eq!(
            library_text(Err(fault)),
            "cannot be used: cublasLtCreate failed on cuda:0: no"
        );
    }

    #[test]
    fn tensor_cores_of_another_architecture_are_named_as_unproven() {
        let gpu = |ordinal, capability| GpuInfo {
            ordinal,
            capability,
            ..info()
        };
        assert!(tensor_text(&[]).ends_with("here: cpu"));
        let both = [gpu(0, HOPPER), gpu(1, (8, 0))];
        assert!(tensor_text(&both).ends_with("here: cpu, cuda:0; unproven on cuda:1"));
    }

    #[test]
    fn a_domain_is_proven_on_the_devices_that_can_compute() {
        assert!(proven_text(&[]).ends_with("8.0 or newer; here: cpu"));
        let usable = ["cuda:0".to_owned(), "cuda:2".to_owned()];
        assert!(proven_text(&usable).ends_with("here: cpu, cuda:0, cuda:2"));
    }
}
