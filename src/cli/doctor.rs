//! `bitstep doctor`.

use clap::Args;

use super::Outcome;
use super::cuda_probe::{self, Cuda};
use super::machine;
use super::verify::PROVABLE_DOMAINS;
use crate::cpu::simd::SimdPath;
use crate::error::ExitCode;
use crate::num;

/// Arguments of `bitstep doctor`: none.
#[derive(Args, Debug)]
pub struct Doctor {}

impl Doctor {
    /// Prints what is here; finding nothing is no error.
    pub fn run(self) -> Outcome {
        print_processor();
        print_cuda(&cuda_probe::probe());
        say!("Numeric domains (contract version {})", num::VERSION);
        say!("  {PROVABLE_DOMAINS}         proven here, on the CPU");
        say!("  bf16.sm90, f16.sm90, tf32.sm90   not in this version");
        Ok(ExitCode::Done)
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

fn print_cuda(cuda: &Cuda) {
    say!("CUDA");
    let driver = cuda.driver.as_deref().unwrap_or("none loaded");
    say!("  driver      {driver}");
    for (name, place) in &cuda.libraries {
        match place {
            Some(path) => say!("  {name:<11} {}", path.display()),
            None => say!("  {name:<11} not found"),
        }
    }
    match &cuda.gpus {
        Err(reason) => say!("  GPUs        none: {reason}"),
        Ok(gpus) if gpus.is_empty() => say!("  GPUs        none"),
        Ok(gpus) => {
            for (ordinal, gpu) in gpus.iter().enumerate() {
                match gpu {
                    Err(reason) => say!("  cuda:{ordinal}      {reason}"),
                    Ok(facts) => say!(
                        "  cuda:{ordinal}      {}, compute capability {}.{}, {:.1} GiB",
                        facts.name,
                        facts.compute_capability.0,
                        facts.compute_capability.1,
                        facts.memory_bytes as f64 / f64::from(1 << 30)
                    ),
                }
            }
        }
    }
}
